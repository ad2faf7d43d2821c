"""Options of a plugged-in part: each part declares a typed model of its own."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PartOptions(BaseModel):
    """Base of every part's options: subclass it, give each field a default and a description.

    Unknown fields are refused; instances are immutable. Users set them with
    ``--attention-backend-options '{"field": value}'`` and its siblings, or in the TOML file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoOptions(PartOptions):
    """For a part that has nothing to set."""
