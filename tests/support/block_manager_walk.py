"""Drives the machine of the block managers by chance alone."""

from __future__ import annotations

from random import Random

from support.block_manager_machine import NAMES, BlockManagerMachine


def random_walk(machine: BlockManagerMachine, seed: int, num_steps: int) -> None:
    """Drive a machine by chance alone: longer, and through more crowded worlds, than Hypothesis
    likes to."""
    draw = Random(seed)

    def tokens(longest: int) -> list[int]:
        run = draw.choice([0, 0, draw.randint(0, longest)])
        return [0] * run + draw.choices([0, 1], k=draw.randint(0 if run else 1, longest - run))

    machine.start(seed)
    for _ in range(num_steps):
        pick = draw.randrange(5)
        action = draw.choices(
            ["allocate", "step", "free", "fork", "swap_out", "swap_in", "probe", "misuse", "clear"],
            [6, 12, 2, 2, 1, 2, 1, 0.2, 0.1],
        )[0]
        live, device = machine.model.holders, machine.on_device()
        if machine.num_available() < 2 and draw.random() < 0.5:
            action = draw.choice(["free", "swap_out"])
        if action == "allocate" and len(live) < len(NAMES):
            machine.allocate(tokens(12), draw.choice(["", "", "", "x"]), draw.choice([0, 0, 1, 4]))
        elif action == "step" and device:
            machine.step(pick, draw.choices([0, 1], k=draw.randint(0, 4)), draw.randint(1, 16))
        elif action == "free" and live:
            machine.free(pick)
        elif action == "fork" and device and len(live) < len(NAMES):
            machine.fork(pick)
        elif action == "swap_out" and device:
            machine.swap_out(pick)
        elif action == "swap_in" and machine.host_ids:
            machine.swap_in(pick)
        elif action == "probe":
            machine.probe(tokens(14), draw.choice(["", "x"]))
        elif action == "misuse" and live:
            machine.misuse(pick)
        elif action == "clear" and live:
            machine.free_all(reset=draw.random() < 0.5)
        machine.counts_agree()
        machine.contents_agree()
    machine.teardown()
