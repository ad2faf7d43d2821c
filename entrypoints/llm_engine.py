"""``LLMEngine``: an engine made from settings, wherever they come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.engine import Engine
from ..plugins.discovery import PluginHost, discover
from .engine_builder import EngineBuilder
from .engine_description import EngineDescription
from .logging import configure_logging
from .settings import Settings, load_settings


class LLMEngine(Engine):
    """An engine made from settings: ``add_request``, ``step``, ``abort_request``.

    Example:
        >>> engine = LLMEngine.from_options(model="demo")  # doctest: +SKIP
        >>> engine.add_request("1", "Hello", SamplingParams(max_tokens=4))  # doctest: +SKIP
        >>> while engine.has_unfinished_requests():  # doctest: +SKIP
        ...     for output in engine.step():
        ...         print(output.outputs[0].text)
    """

    settings: Settings
    description: EngineDescription

    @classmethod
    def from_options(cls, **options: Any) -> LLMEngine:
        """Build from keyword arguments: any setting of ``EngineOptions`` by name.

        Settings that are not given come from ``JACKFIELD_*``, the TOML file that
        ``JACKFIELD_CONFIG`` names, and the defaults. Raises as ``LLM``.
        """
        configure_logging(os.environ)
        config = os.environ.get("JACKFIELD_CONFIG")
        path = None if config is None else Path(config)
        return cls.from_settings(load_settings(options, os.environ, path, keyword_arguments=True))

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any], config: Path | None) -> LLMEngine:
        """Build from command-line flags and a TOML file. Raises as ``LLM``."""
        return cls.from_settings(load_settings(flags, os.environ, config))

    @classmethod
    def from_settings(cls, settings: Settings, host: PluginHost | None = None) -> LLMEngine:
        """Build from settings, with the parts of all installed plugins, or of ``host``."""
        engine, description = EngineBuilder(settings, host or discover()).build(cls)
        engine.settings = settings
        engine.description = description
        return engine
