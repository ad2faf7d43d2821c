"""Which decoding steps become CUDA graphs, and capturing them at startup."""

from __future__ import annotations

import logging
import time

import torch
from tqdm import tqdm

from ..core.attention import AttentionBackend
from ..core.config import EngineOptions
from ..core.decode_graphs import DecodeGraphs, default_graph_sizes
from ..core.errors import ConfigError
from ..plugins.selection import Selection

logger = logging.getLogger("jackfield")


def choose_graph_sizes(
    options: EngineOptions, choice: Selection[AttentionBackend], device: torch.device
) -> tuple[int, ...]:
    """Decoding steps to be captured, by their numbers of requests; none without CUDA graphs.

    Args:
        options: settings.
        choice: the attention backend.
        device: where it runs.

    Raises:
        ConfigError: sizes were asked for, and there are no CUDA graphs, or so many requests are
            never computed side by side.
    """
    asked, most = options.cuda_graph_sizes, options.max_num_seqs
    why_not = _why_no_graphs(options, choice, device)
    if asked is None:
        if why_not is None:
            return default_graph_sizes(most)
        logger.info("no CUDA graphs: %s", why_not)
        return ()
    if why_not is not None:
        raise ConfigError(
            f"cuda_graph_sizes={list(asked)} asks for CUDA graphs, and {why_not}: leave it unset, "
            "or change the other setting"
        )
    if asked[-1] > most:
        raise ConfigError(
            f"cuda_graph_sizes={list(asked)} goes beyond max_num_seqs={most}: no step has more "
            "requests than that"
        )
    return asked


def capture(graphs: DecodeGraphs) -> None:
    """Capture all graphs, with a progress bar on a terminal."""
    started = time.monotonic()
    with tqdm(total=len(graphs.sizes), desc="CUDA graphs", disable=None, leave=False) as bar:
        graphs.capture(lambda size: bar.update(1))
    logger.info(
        "captured CUDA graphs of decoding steps for %s requests in %.1f s",
        ", ".join(map(str, graphs.sizes)),
        time.monotonic() - started,
    )


def _why_no_graphs(
    options: EngineOptions, choice: Selection[AttentionBackend], device: torch.device
) -> str | None:
    if options.enforce_eager:
        return "enforce_eager=True forbids them"
    if device.type != "cuda":
        return f"device={device} has none"
    if not choice.cls.capabilities(device).cuda_graphs:
        return f"attention_backend={choice.name} does not support them"
    return None
