"""Judging this machine before a launch: what a policy needs, found or not, with the fix.

Contract: looks and changes nothing (a port is bound for microseconds). Every look is
bounded: memory that does not answer is a finding after the policy's time-out. Not for the event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from supervisord_vllm import places
from supervisord_vllm.core.facts import DeviceMemory, ProcessRef
from supervisord_vllm.core.ledger import gib, requested, room
from supervisord_vllm.core.levers import UTILIZATION, WEIGHTS, Weights
from supervisord_vllm.engine.command import executable
from supervisord_vllm.host import lock, port, tree
from supervisord_vllm.host.memory import MemoryUnavailable, Sampler, device_count, source_of

if TYPE_CHECKING:
    from supervisord_vllm.config import Settings

Severity = Literal["ok", "warning", "error"]
_WEIGHT_FILES = ("*.safetensors", "*.gguf", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one subject. An ``error`` keeps the launch from succeeding as declared; a ``warning`` is
    waited for or worked around. ``fix`` is what a person can do, empty where nothing is to be done."""

    severity: Severity
    subject: str
    what: str
    fix: str = ""

    @property
    def text(self) -> str:
        """One sentence: what, and the fix."""
        return f"{self.what}; {self.fix}" if self.fix else self.what


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, and the devices that the engine will use (empty where memory can't be read)."""

    findings: tuple[Finding, ...]
    devices: tuple[DeviceMemory, ...]

    @property
    def severity(self) -> Severity:
        """The worst of the findings."""
        found = {finding.severity for finding in self.findings}
        return "error" if "error" in found else "warning" if "warning" in found else "ok"


def examine(settings: Settings, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """What this machine has to say about a policy; see `inspect`."""
    return list(inspect(settings, environ).findings)


def inspect(settings: Settings, environ: Mapping[str, str] | None = None) -> Report:
    """Looks at command, model, folders, ports and memory. ``environ`` is what the engine inherits (ours)."""
    environ = os.environ if environ is None else environ
    ours = tree.owned_pids(places.instance(settings.state_dir))
    devices: tuple[DeviceMemory, ...] = ()
    findings = [
        _command(settings, environ),
        *_models(settings),
        *_folders(settings),
        *asyncio.run(_ports(settings, ours)),
    ]
    try:
        devices = asyncio.run(_sample(settings, environ, ours))
        findings += _memory(settings, devices)
    except (MemoryUnavailable, ValueError) as error:
        fix = 'correct [memory] source, or set it to "host" for a CPU engine'
        findings.append(Finding("error", "memory", f"cannot be read: {error}", fix))
    return Report(tuple(findings), devices)


async def _sample(settings: Settings, environ: Mapping[str, str], ours: frozenset[int]) -> tuple[DeviceMemory, ...]:
    sampler = Sampler(lambda: source_of(settings.engine, settings.memory, environ), timeout_s=settings.memory.timeout_s)
    try:
        return await sampler.sample(ours)
    finally:
        sampler.close()


def _command(settings: Settings, environ: Mapping[str, str]) -> Finding:
    program = executable(settings.engine, environ)
    if program is None:
        what = f"{settings.engine.command[0]}: no such program that this user may execute"
        return Finding("error", "command", what, "install vLLM, or give [engine] command the full path of vllm")
    return Finding("ok", "command", program)


def _models(settings: Settings) -> Iterator[Finding]:
    """Local checkpoints must be there; names of a hub are vLLM's business."""
    rung = settings.policy.rung(WEIGHTS)
    others = [use.model for use in rung.use if isinstance(use, Weights)] if rung is not None else []
    for model in dict.fromkeys([settings.engine.model, *others]):
        if not model.startswith(("/", "./", "../", "~")):
            continue
        path = (settings.engine.working_dir or Path()) / Path(model).expanduser()
        if not path.exists():
            yield Finding("error", "model", f"{path}: no such folder or file", "correct the path, or fetch the model")
        elif path.is_dir() and not (path / "config.json").exists():
            yield Finding("error", "model", f"{path}: holds no config.json", "give the folder of a whole checkpoint")
        else:
            size = _weights_bytes(path)
            yield Finding("ok", "model", f"{path}, {gib(size)} of weights" if size else str(path))


def _weights_bytes(path: Path) -> int:
    """Bytes of the files that vLLM loads: of the first format that is there; 0 where there is none."""
    if path.is_file():
        return path.stat().st_size
    for pattern in _WEIGHT_FILES:
        if found := sum(file.stat().st_size for file in path.glob(pattern)):
            return found
    return 0


def _folders(settings: Settings) -> Iterator[Finding]:
    for subject, folder in (("state-dir", settings.state_dir), ("runtime-dir", settings.runtime_dir)):
        existing = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
        if not existing.is_dir():
            yield Finding("error", subject, f"{existing} is no folder", f"remove it, or choose another {subject}")
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield Finding("error", subject, f"{existing} cannot be written", f"change its owner, or set {subject}")
        else:
            yield Finding("ok", subject, str(folder) if existing == folder else f"{folder} (will be made)")
    owner = lock.state_owner(settings.state_dir)
    if owner is not None and owner.pid != os.getpid():
        yield Finding("warning", "daemon", f"{owner} supervises with this state directory already")


async def _ports(settings: Settings, ours: frozenset[int]) -> list[Finding]:
    engine = settings.engine
    if engine.url.startswith("unix:"):
        where, owner = engine.url, await port.socket_owner(engine.url.removeprefix("unix:"))
    else:
        where, owner = f"port {engine.port}", await port.port_owner(engine.host, engine.port)
    findings = [_port("port", where, owner, ours, "stop it, or set another [engine] port")]
    if settings.http.address is not None:
        host, number = settings.http.address
        taken = await port.port_owner(host, number)
        findings.append(_port("http", f"port {number}", taken, ours, "set another [http] listen, or ignore it"))
    return findings


def _port(subject: str, where: str, owner: ProcessRef | None, ours: frozenset[int], fix: str) -> Finding:
    if owner is None:
        return Finding("ok", subject, f"{where} is free")
    if owner.pid in ours:
        return Finding("warning", subject, f"{where} is taken by our own engine, {owner}")
    return Finding("warning", subject, f"{where} is taken by {owner}", fix)


def _memory(settings: Settings, devices: tuple[DeviceMemory, ...]) -> Iterator[Finding]:
    needed = device_count(settings.engine.args)
    if settings.memory.source != "host" and len(devices) < needed and settings.memory.card is None:
        what = f"the engine uses {needed} devices, {len(devices)} can be seen"
        yield Finding("warning", "memory", what, "correct --tensor-parallel-size or CUDA_VISIBLE_DEVICES")
    for device in devices:
        holders = ", ".join(f"{holder}: {gib(holder.memory_bytes or 0)}" for holder in device.holders[:3])
        what = f"{gib(device.total_bytes)} total, {gib(device.free_bytes)} free"
        yield Finding("ok", device.device, f"{what}; held by {holders}" if holders else what)
    yield from _utilization(settings, devices)
    yield from _weights(settings, devices)


def _utilization(settings: Settings, devices: tuple[DeviceMemory, ...]) -> Iterator[Finding]:
    declared, rung = settings.policy.declared.get(UTILIZATION), settings.policy.rung(UTILIZATION)
    tightest = room([devices], {})
    if tightest is None:
        return
    fits = tightest.fits
    if not isinstance(declared, int):
        yield Finding("ok", "utilization", f"not declared; up to {fits / 1000:.3f} fits now on {tightest.device}")
        return
    wants = f"{declared / 1000:.3f} asks for {gib(requested(declared, tightest.total))} of {tightest.device}"
    if tightest.short_of(declared) <= 0:
        yield Finding("ok", "utilization", f"{wants}, up to {fits / 1000:.3f} fits now")
        return
    short = f"{wants}, {gib(tightest.short_of(declared))} more than is free beside its own context"
    if rung is not None and rung.min is not None and rung.min <= fits:
        yield Finding("warning", "utilization", f"{short}: the first launch would use {fits / 1000:.3f}", "free memory")
    else:
        fix = f"free memory, or permit {fits / 1000:.3f} in the ladder" if fits else "free memory"
        yield Finding("error", "utilization", f"{short}; at most {fits / 1000:.3f} fits", fix)


def _weights(settings: Settings, devices: tuple[DeviceMemory, ...]) -> Iterator[Finding]:
    """A local checkpoint in the format that is served is at least as large on the card."""
    path = (settings.engine.working_dir or Path()) / Path(settings.engine.model).expanduser()
    size = _weights_bytes(path) if path.exists() else 0
    if not size or not devices or settings.engine.quantization is not None:
        return
    share, total = size // device_count(settings.engine.args), min(device.total_bytes for device in devices)
    if share > total:
        what = f"{gib(share)} of weights for each device, which has {gib(total)}"
        yield Finding("error", "weights", what, "use more devices, or quantised weights")
