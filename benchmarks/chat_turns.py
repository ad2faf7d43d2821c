"""What prefix caching saves in a conversation: turn by turn, with and without.

    python benchmarks/chat_turns.py --output benchmarks/results/chat_turns.json

Several conversations of eight turns with the demo model, one after the other, as ``jackfield chat``
has them: each turn renders all messages with the chat template, and the answer is appended as text.
Three engines answer the same turn in the same process, in turn first: without prefix caching, and
with the block managers ``paged`` and ``radix`` with it. Answers are greedy, and must be equal
whatever was cached. The time to the first token runs from the arrival of the request, when its
prompt has been tokenized, to its first sampled token.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reporting import write_report

from jackfield import LLM, SamplingParams

ENGINES: dict[str, dict[str, Any]] = {
    "off": {"enable_prefix_caching": False},
    "paged": {"enable_prefix_caching": True, "block_manager": "paged"},
    "radix": {"enable_prefix_caching": True, "block_manager": "radix"},
}
#: What a user may say about any subject, turn after turn.
QUESTIONS = (
    "I am preparing a talk about {0} for people who have never heard of it. Explain in plain words "
    "what it is, why it matters, and what most people get wrong about it when they first meet it.",
    "Thank you. Now give me one example of {0} from daily life that a child of ten would know, "
    "and say in one sentence how the example and the explanation belong together.",
    "A listener will certainly ask how we know all this. Which observation or experiment about {0} "
    "convinced people, roughly when was it made, and what did they believe before?",
    "What is the strongest objection to what you have said so far about {0}, and what would you "
    "answer to somebody who raises it in front of the whole audience?",
    "Please give me three short questions about {0} that I can put to the audience in the middle "
    "of the talk, from an easy one to a hard one, without the answers.",
    "Now suggest a picture or a diagram of {0} that I could draw on a blackboard in less than one "
    "minute, and describe the order in which I should draw its parts.",
    "I have only five minutes. Which two of the things that we have talked about should I leave "
    "out, and which one must stay in a talk about {0}, whatever happens?",
    "Finally, write the closing sentence of the talk about {0}. It should be short, easy to "
    "remember, and have no word in it that I would have to explain.",
)
SUBJECTS = ("the tides", "vaccination", "compound interest", "photosynthesis", "earthquakes")


@dataclass(frozen=True)
class Turn:
    """One answer of one engine.

    Attributes:
        prompt_tokens: of all messages so far.
        cached_tokens: those of them that were in the cache.
        computed_tokens: prompt tokens that were computed, counted by the engine.
        reused_blocks: blocks that were shared with what was computed before.
        seconds: until the first token.
        tokens: the answer.
        text: the answer.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    reused_blocks: int
    seconds: float
    tokens: tuple[int, ...]
    text: str


def answer(llm: LLM, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Turn:
    """One turn of a conversation."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    before = llm.engine.stats().num_computed_tokens
    (output,) = llm.chat([dict(message) for message in messages], params, use_tqdm=False)
    if output.error is not None:
        raise output.error
    assert output.metrics is not None
    assert output.metrics.first_token_time is not None
    completion = output.outputs[0]
    tokens = tuple(completion.token_ids)
    # The last token is sampled and never computed.
    computed = llm.engine.stats().num_computed_tokens - before - (len(tokens) - 1)
    return Turn(
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens,
        computed_tokens=computed,
        reused_blocks=output.num_cached_tokens // llm.engine.block_manager.config.block_size,
        seconds=output.metrics.first_token_time - output.metrics.arrival_time,
        tokens=tokens,
        text=completion.text,
    )


def converse(
    engines: Mapping[str, LLM], subject: str, max_tokens: int, first: int
) -> list[dict[str, Turn]]:
    """One conversation; the turns by engine.

    Args:
        engines: all answer every turn.
        subject: what the conversation is about.
        max_tokens: of an answer.
        first: which engine answers the first turn first; the next one does at the next turn.

    Raises:
        RuntimeError: two engines answer differently.
    """
    names = list(engines)
    messages: list[dict[str, str]] = []
    turns = []
    for number, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question.format(subject)})
        start = (first + number) % len(names)
        order = names[start:] + names[:start]
        turn = {name: answer(engines[name], messages, max_tokens) for name in order}
        if len({one.tokens for one in turn.values()}) != 1:
            raise RuntimeError(f"turn {number + 1} about {subject}: the answers differ")
        messages.append({"role": "assistant", "content": turn[names[0]].text})
        turns.append({name: turn[name] for name in names})
        print(f"  {subject}, turn {number + 1}: " + describe(turn, names), flush=True)
    return turns


def describe(turn: Mapping[str, Turn], names: Sequence[str]) -> str:
    """One line for the terminal."""
    return ", ".join(
        f"{name} {turn[name].computed_tokens} of {turn[name].prompt_tokens} tokens computed, "
        f"{turn[name].seconds * 1e3:.0f} ms"
        for name in names
    )


def summarise(chats: Sequence[Sequence[Mapping[str, Turn]]]) -> list[dict[str, Any]]:
    """Medians over the conversations, a row for each turn and engine."""
    rows = []
    for number, same_turn in enumerate(zip(*chats, strict=True), start=1):
        for name in same_turn[0]:
            turns = [turn[name] for turn in same_turn]
            rows.append(
                {
                    "turn": number,
                    "engine": name,
                    "prompt_tokens": statistics.median(turn.prompt_tokens for turn in turns),
                    "cached_tokens": statistics.median(turn.cached_tokens for turn in turns),
                    "reused_blocks": statistics.median(turn.reused_blocks for turn in turns),
                    "computed_tokens": statistics.median(turn.computed_tokens for turn in turns),
                    "first_token_ms": 1e3 * statistics.median(turn.seconds for turn in turns),
                }
            )
    return rows


def count_equal_answers(chats: Sequence[Sequence[Mapping[str, Turn]]]) -> dict[str, int]:
    """In how many turns all engines answered, and in how many of them with the same tokens.

    Raises:
        RuntimeError: in some turn they did not.
    """
    turns = [turn for chat in chats for turn in chat]
    equal = sum(len({one.tokens for one in turn.values()}) == 1 for turn in turns)
    if equal != len(turns):
        raise RuntimeError(f"the answers differ in {len(turns) - equal} of {len(turns)} turns")
    return {"turns_compared": len(turns), "turns_with_equal_answers": equal}


def numbers(turn: Mapping[str, Turn]) -> dict[str, dict[str, Any]]:
    """A turn for the report, without the answer itself, which is the same for all engines."""
    return {
        name: {
            key: len(value) if key == "tokens" else value
            for key, value in asdict(one).items()
            if key != "text"
        }
        for name, one in turn.items()
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="as for jackfield --model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chats", type=int, default=5, choices=range(1, len(SUBJECTS) + 1))
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    return parser.parse_args()


def main() -> None:
    """Hold the conversations, print a table, write it down."""
    arguments = parse_arguments()
    engines = {
        name: LLM(
            arguments.model,
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            max_num_seqs=2,
            device="cpu",
            **options,
        )
        for name, options in ENGINES.items()
    }
    for llm in engines.values():  # the first call of a process is slow
        llm.generate([list(range(1000, 1100))], SamplingParams(max_tokens=4), use_tqdm=False)
    chats = []
    for index, subject in enumerate(SUBJECTS[: arguments.chats]):
        for name, llm in engines.items():
            if name != "off" and not llm.reset_prefix_cache():
                raise RuntimeError(f"the prefix cache of {name} is in use")
        chats.append(converse(engines, subject, arguments.max_tokens, index))
    rows = summarise(chats)
    names = list(rows[0])
    print("\n" + "  ".join(f"{name:>15}" for name in names))
    for row in rows:
        print(
            "  ".join(
                f"{row[name]:>15.10g}" if name != "engine" else f"{row[name]:>15}" for name in names
            )
        )
    report = {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "block_size": next(iter(engines.values())).engine.description.block_size,
        "max_tokens": arguments.max_tokens,
        **count_equal_answers(chats),
        "rows": rows,
        "chats": [
            {"subject": subject, "turns": [numbers(turn) for turn in chat]}
            for subject, chat in zip(SUBJECTS, chats, strict=False)
        ],
    }
    write_report(arguments.output, report)


if __name__ == "__main__":
    main()
