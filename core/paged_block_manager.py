"""The default block manager under its short path, for parts that build on it."""

from __future__ import annotations

from .block_managers.paged import PagedBlockManager

__all__ = ["PagedBlockManager"]
