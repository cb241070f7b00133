"""One interface to device memory, whatever the device is, and looking at it without ever blocking the event loop.

Contract: a `MemorySource` gives one `DeviceMemory` per device that the engine will use, or raises `MemoryUnavailable`
with one line; it may block (NVML was seen to block for 45 s) and is used by one thread at a time. The `Sampler` gives
it a thread of its own and a time-out; while a call hangs, later samples fail at once instead of piling up threads. A
device is named by what its lock is named after: the UUID of a GPU or MIG slice, or ``host-memory``.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from supervisord_vllm.core.facts import DeviceMemory

if TYPE_CHECKING:
    from supervisord_vllm.config import Engine, Memory

TIMEOUT_S = 5.0
_PARALLEL = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    **{flag: flag for flag in ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")},
}


class MemoryUnavailable(Exception):  # noqa: N818 - an answer, not a mistake
    """Memory can't be read now; the text is one line that says why. ``vanished``: a GPU is lost, says the driver."""

    vanished = False


class MemorySource(Protocol):
    """Where device memory is read."""

    @property
    def name(self) -> str:
        """``nvml``, ``host`` or ``card:PATH``."""

    def sample(self, own_pids: frozenset[int]) -> tuple[DeviceMemory, ...]:
        """One look. ``own_pids`` are the engine's processes: their memory is ``own_bytes``.

        Raises:
            MemoryUnavailable: it can't be read now.
        """


def open_source(spec: str, environ: Mapping[str, str], *, devices: int = 1) -> MemorySource:
    """The source that ``[memory] source`` names: ``auto``, ``nvml``, ``host`` or ``card:PATH`` (a simulated card).

    ``environ`` is the engine's environment (CUDA_VISIBLE_DEVICES), ``devices`` how many devices it uses (tensor times
    pipeline parallel size). ``auto`` takes NVML where it finds a GPU that the engine may use, host memory where there
    is none or no NVIDIA driver, and fails where a driver is there but broken: guessing would judge the wrong memory.

    Raises:
        MemoryUnavailable: the source can't be opened now.
        ValueError: no such source.
    """
    if spec.startswith("card:"):
        from supervisord_vllm.host.simulated import CardMemory

        return CardMemory(Path(spec.removeprefix("card:")), environ)
    if spec == "host":
        from supervisord_vllm.host.hostmemory import HostMemory

        return HostMemory()
    if spec in ("auto", "nvml"):
        from supervisord_vllm.host.nvml import NoDriver, NvmlMemory

        try:
            return NvmlMemory(environ, devices=devices)
        except NoDriver:
            if spec == "nvml":
                raise
        from supervisord_vllm.host.hostmemory import HostMemory

        return HostMemory()
    raise ValueError(f"memory source {spec!r}: use auto, nvml, host or card:PATH")


def device_count(args: Sequence[str]) -> int:
    """How many devices an engine with these arguments uses: tensor times pipeline times data parallel size.

    A size that is no number counts as 1: vLLM will refuse it in its own words.
    """
    found = dict.fromkeys(_PARALLEL.values(), 1)
    for index, word in enumerate(args):
        flag, equals, value = word.partition("=")
        name = _parallel(flag.replace("_", "-"))
        if name is not None:
            value = value if equals else args[index + 1] if index + 1 < len(args) else ""
            found[name] = int(value) if value.isascii() and value.isdigit() and len(value) < 6 else 1
    return max(1, prod(found.values()))


def _parallel(flag: str) -> str | None:
    if flag in _PARALLEL:
        return _PARALLEL[flag]
    # argparse takes any beginning that is not also another flag's; "--data-parallel-size" is never shortened so far.
    whole = [name for name in set(_PARALLEL.values()) if name.startswith(flag) and len(flag) > len("--tensor")]
    return whole[0] if len(whole) == 1 and whole[0] != "--data-parallel-size" else None


def source_of(engine: Engine, memory: Memory, environ: Mapping[str, str]) -> MemorySource:
    """The source for a policy's engine; ``environ`` is what the engine inherits (ours). Raises as `open_source`."""
    spec = f"card:{memory.card}" if memory.card is not None else memory.source
    return open_source(spec, {**environ, **engine.env}, devices=device_count(engine.args))


class Sampler:
    """Samples a source in one thread of its own.

    ``opener`` makes the source (that can block too) at the first sample, and again after a sample failed.
    """

    def __init__(self, opener: Callable[[], MemorySource], *, timeout_s: float = TIMEOUT_S) -> None:
        self._opener = opener
        self._timeout = timeout_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._source: MemorySource | None = None  # touched by the thread alone
        self._turn = asyncio.Lock()
        self._pending: asyncio.Future[tuple[DeviceMemory, ...]] | None = None
        self._asked_at = 0.0
        self._taken_at: float | None = None
        self._bus_ids: frozenset[str] = frozenset()
        self.last: tuple[DeviceMemory, ...] | None = None
        """The last sample that succeeded; see `age_s`."""

    @property
    def age_s(self) -> float | None:
        """Seconds since `last` was taken, ``None`` before the first."""
        return None if self._taken_at is None else monotonic() - self._taken_at

    async def sample(self, own_pids: frozenset[int]) -> tuple[DeviceMemory, ...]:
        """One look, at most ``timeout_s`` long.

        Raises:
            MemoryUnavailable: it can't be read, or the last call has not come back yet.
        """
        async with self._turn:
            if self._pending is not None and not self._pending.done():
                raise MemoryUnavailable(self._silence())
            self._asked_at = monotonic()
            self._pending = self._ask(own_pids)
            try:
                devices = await asyncio.wait_for(asyncio.shield(self._pending), self._timeout)
            except asyncio.TimeoutError:
                raise MemoryUnavailable(self._silence()) from None
            self.last, self._taken_at = devices, monotonic()
            return devices

    @property
    def bus_ids(self) -> frozenset[str]:
        """PCI addresses of the devices (``0000:3b:00``), as the last sample's source knows them; empty elsewhere."""
        return self._bus_ids

    def close(self) -> None:
        """Lets the thread end after the call that it is in; it never keeps the process alive."""
        self._jobs.put(None)

    def _silence(self) -> str:
        return f"device memory has not answered for {monotonic() - self._asked_at:.0f} s"

    def _ask(self, own_pids: frozenset[int]) -> asyncio.Future[tuple[DeviceMemory, ...]]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[DeviceMemory, ...]] = loop.create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting any more

        def settle(devices: tuple[DeviceMemory, ...] | None, error: Exception | None) -> None:
            if answer.done():
                return
            if devices is not None:
                answer.set_result(devices)
            else:
                answer.set_exception(error or MemoryUnavailable("no answer"))

        def job() -> None:
            devices: tuple[DeviceMemory, ...] | None = None
            error: Exception | None = None
            try:
                if self._source is None:
                    self._source = self._opener()
                devices = self._source.sample(own_pids)
                self._bus_ids = getattr(self._source, "bus_ids", frozenset())
            except MemoryUnavailable as unavailable:
                self._source, error = None, unavailable
            except Exception as unexpected:  # noqa: BLE001 - a source's bug must not end the thread and look like a hang
                self._source, error = None, MemoryUnavailable(f"{type(unexpected).__name__}: {unexpected}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, devices, error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="memory-sampler", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return answer

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
