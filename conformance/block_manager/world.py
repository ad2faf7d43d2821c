"""Tiny worlds and the prompts in them: so small that everything collides."""

from __future__ import annotations

from ...core.block_manager import BlockManagerConfig

SALTS = ("", "x")
#: Patterns that prompts follow; the same pattern, the same tokens.
_PATTERNS: tuple[tuple[int, ...], ...] = ((0,), (0, 1), (0, 0, 0, 1))


def prompt(pattern: int, length: int, twist: int) -> list[int]:
    """Tokens of a prompt.

    Args:
        pattern: which pattern it follows.
        length: how many.
        twist: position of a token that differs from the pattern; 0 is none.
    """
    repeated = _PATTERNS[pattern % len(_PATTERNS)]
    tokens = [repeated[position % len(repeated)] for position in range(length)]
    if 0 < twist <= length:
        tokens[twist - 1] = 2
    return tokens


def describe(config: BlockManagerConfig) -> str:
    """The configuration as Python, defaults left out."""
    parts = [f"num_blocks={config.num_blocks}", f"block_size={config.block_size}"]
    parts += [f"max_model_len={config.max_model_len}", f"watermark={config.watermark}"]
    for name in ("num_host_blocks", "enable_prefix_caching", "num_lookahead_tokens"):
        value = getattr(config, name)
        if value:
            parts.append(f"{name}={value}")
    return f"BlockManagerConfig({', '.join(parts)})"
