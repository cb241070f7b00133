"""Everything that a run of the daemon needs to know, typed, resolved and with the origin of every value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from supervisord_vllm.config import schema
from supervisord_vllm.core.levers import Levers, Weights
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.redaction import secret_flag, secret_variable

_NOT_COMPARED = frozenset({"--served-model-name", "--log-level", "--logging-config", "--log-config-file"})
"""Arguments that change nothing about what fits (secrets come on top)."""


@dataclass(frozen=True)
class Engine:
    """How vLLM is started and reached. Paths are absolute; secrets are not shown by ``repr``.

    ``env`` is the env-file with ``[engine.env]`` laid over it. ``url`` is where requests go:
    ``http://127.0.0.1:8000``, with the root path if there is one and no slash at its end, or ``unix:/path/of/socket``.
    ``api_key`` is what clients must send.
    """

    command: tuple[str, ...]
    model: str
    args: tuple[str, ...]
    port: int
    url: str
    host: str | None = None
    quantization: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    working_dir: Path | None = None
    verify_tls: bool = True
    ca_file: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    env_file: Path | None = None


@dataclass(frozen=True)
class Memory:
    """Where memory is read: ``auto``, ``nvml``, ``host``, or ``card`` with the path of a simulated card's state."""

    source: str
    card: Path | None
    timeout_s: float


@dataclass(frozen=True)
class Settings:
    """The result of `supervisord_vllm.config.load`.

    ``origins`` maps every key (dotted, kebab-case; ``ladder[0].min``) to ``default``, ``FILE:LINE``, ``environment
    NAME`` or ``flag --set KEY``. ``warnings`` are one line each. ``secrets`` are for the `Redactor` and not shown by
    ``repr``. The tables from ``proof`` on are those of the file; a `Duration` has ``seconds`` and ``ns``.
    """

    path: Path
    name: str
    act: bool
    on_give_up: str
    state_dir: Path
    runtime_dir: Path
    engine: Engine
    policy: Policy
    memory: Memory
    pressure: schema.PressureTable
    proof: schema.ProofTable
    step_up: schema.StepUpTable
    restart: schema.RestartTable
    gate: schema.GateTable
    start: schema.StartTable
    hang: schema.HangTable
    serving: schema.ServingTable
    http: schema.HttpTable
    log: schema.LogTable
    poll: schema.PollTable
    stop: schema.StopTable
    systemd: schema.SystemdTable
    origins: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    secrets: tuple[str, ...] = field(default=(), repr=False)


def fingerprint(engine: Engine, declared: Levers | None, source: str, devices: str | None) -> str:
    """What makes launches comparable, as a hash: an edited wish is another one; ladder bounds, secrets and names are
    not.

    ``devices`` is the CUDA_VISIBLE_DEVICES that the engine inherits. Without ``declared`` it is the same for every
    wish: what was observed of whole lever vectors belongs to it.
    """
    weights = declared.get("weights") if declared is not None else None
    told = {
        "command": engine.command,
        "model": engine.model,
        "quantization": weights.quantization if isinstance(weights, Weights) else None,
        "args": _compared(engine.args),
        "env": sorted([name, value] for name, value in engine.env.items() if not secret_variable(name)),
        "declared": declared.to_json() if declared is not None else None,
        "memory": source,
        "devices": engine.env.get("CUDA_VISIBLE_DEVICES", devices),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()


def _compared(args: Sequence[str]) -> list[str]:
    kept: list[str] = []
    dropping = False
    for word in args:
        if word.startswith("-"):
            flag = word.partition("=")[0].replace("_", "-")
            dropping = flag in _NOT_COMPARED or secret_flag(flag)
        if not dropping:
            kept.append(word)
    return kept
