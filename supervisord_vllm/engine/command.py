"""The engine's command line and environment for one launch.

Nothing here passes through a shell. The order is: the command, the model, the address, the levers, the operator's
arguments.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from supervisord_vllm.core.levers import LEVERS, WEIGHTS, Levers, LeverValue, Weights

if TYPE_CHECKING:
    from supervisord_vllm.config import Engine

MARKER = "SUPERVISE_LAUNCH"
"""The variable that makes every process of a launch recognisable: ``INSTANCE.UUID``."""

_OURS = ("SUPERVISE_", "WATCHDOG_", "LISTEN_")
_OURS_EXACT = frozenset({"NOTIFY_SOCKET"})


def command_line(engine: Engine, levers: Levers) -> list[str]:
    """The words of one launch. A lever that is absent, or a switch that is off, is left to vLLM's own default."""
    weights = levers.get(WEIGHTS)
    if not isinstance(weights, Weights):
        weights = Weights(engine.model, engine.quantization)
    words = [*engine.command, weights.model]
    if engine.host is not None:
        words += ["--host", engine.host]
    words += ["--port", str(engine.port)]
    for name, value in levers.items():
        words += _flag(name, value)
    if weights.quantization is not None:
        words += ["--quantization", weights.quantization]
    return [*words, *engine.args]


def _flag(name: str, value: LeverValue) -> list[str]:
    spec = LEVERS[name]
    if spec.flag is None:
        return []
    if isinstance(value, bool):
        return [spec.flag] if value else []
    if spec.kind == "per_mille" and isinstance(value, int):
        return [spec.flag, f"{value // 1000}.{value % 1000:03d}".rstrip("0").rstrip(".")]
    return [spec.flag, str(value)]


def engine_environment(engine: Engine, base: Mapping[str, str], marker: str) -> dict[str, str]:
    """The environment of one launch: ours without what is meant for us alone, then the operator's, then the marker.

    ``SPT_NOENV`` keeps vLLM's setproctitle from overwriting /proc/PID/environ, where the marker is read. The API key
    from a file is given as VLLM_API_KEY unless the operator's variables set that.
    """
    env = {name: value for name, value in base.items() if not name.startswith(_OURS) and name not in _OURS_EXACT}
    env["NO_COLOR"] = "1"
    if engine.api_key_file is not None and engine.api_key is not None:
        env["VLLM_API_KEY"] = engine.api_key
    env.update(engine.env)
    env["SPT_NOENV"] = "1"
    env[MARKER] = marker
    return env


def executable(engine: Engine, base: Mapping[str, str]) -> str | None:
    """The program that would be started, or ``None`` where there is no such program that this user may execute."""
    program = engine.command[0]
    if os.sep in program and engine.working_dir is not None:
        program = os.fspath(engine.working_dir / program)
    return shutil.which(program, path=engine.env.get("PATH", base.get("PATH", os.defpath)))
