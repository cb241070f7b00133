"""The policy file: TOML to typed, validated settings with the origin of every value.

`load` is the only way in; `ConfigError` is the only error that it raises, with one line per problem.
"""

from __future__ import annotations

from supervisord_vllm.config.errors import ConfigError
from supervisord_vllm.config.loading import load
from supervisord_vllm.config.settings import Engine, Memory, Settings
from supervisord_vllm.config.units import Duration

__all__ = ["ConfigError", "Duration", "Engine", "Memory", "Settings", "load"]
