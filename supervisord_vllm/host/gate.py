"""The gate's eyes: port, device locks and memory, sampled again and again until the core opens or closes it.

Nothing is decided here; each look becomes one `GateSampled`. The locks of the devices are taken before a look and kept
while memory is enough, so that the last sample before a launch is taken under them: of two daemons that start at once
the second sees the first one's engine. They are given back while memory is short: waiting must not block others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from supervisord_vllm.clock import boottime_ns
from supervisord_vllm.core.facts import Fact, GateSampled, ProcessRef
from supervisord_vllm.host.lock import HeldLocks, LockError, LockHeld, lock_devices, lock_dir
from supervisord_vllm.host.memory import MemoryUnavailable, Sampler

FAST_S = 0.1
"""Between two looks during the first window."""
SLOW_S = 1.0
"""Between two looks while something is waited for."""

PortOwner = Callable[[], Awaitable["ProcessRef | None"]]


class Gate:
    """Watches for one launch after the other; `post` takes the facts, ``short`` says whether memory was found short."""

    def __init__(
        self,
        sampler: Sampler,
        port_owner: PortOwner,
        runtime_dir: Path,
        post: Callable[[Fact], None],
        short: Callable[[], bool],
    ) -> None:
        self._sampler = sampler
        self._port_owner = port_owner
        self._runtime_dir = runtime_dir
        self._post = post
        self._short = short
        self._task: asyncio.Task[None] | None = None
        self._locks: HeldLocks | None = None
        self._locked: frozenset[str] = frozenset()

    @property
    def locks(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The descriptors that hold device locks, and the devices."""
        return (self._locks.descriptors, tuple(sorted(self._locked))) if self._locks is not None else ((), ())

    def take_over(self, descriptors: tuple[int, ...], devices: tuple[str, ...]) -> None:
        """Hold locks that a daemon before us in this process took for the launch that goes on."""
        self._locks, self._locked = HeldLocks(descriptors), frozenset(devices)

    def lock(self, devices: tuple[str, ...]) -> None:
        """Take the locks for a start that goes on under a new daemon, where they are free: nothing waits for them."""
        with contextlib.suppress(LockHeld, LockError):
            self._locks = lock_devices(devices, lock_dir(self._runtime_dir))
            self._locked = frozenset(devices)

    def watch(self, launch: int) -> None:
        """Begin to look, for this launch."""
        self.close()
        self._task = asyncio.get_running_loop().create_task(self._watch(launch), name=f"gate-{launch}")

    def opened(self) -> None:
        """The launch was decided: stop looking and keep the locks until `release`."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """Stop looking and give the locks back."""
        self.opened()
        self.release()

    def release(self) -> None:
        """Give the locks back: the engine has taken its memory, or is gone."""
        if self._locks is not None:
            self._locks.release()
            self._locks, self._locked = None, frozenset()

    async def _watch(self, launch: int) -> None:
        looks = 0
        while True:
            self._post(await self._look(launch))
            looks += 1
            await asyncio.sleep(FAST_S if looks < 30 else SLOW_S)
            if self._short():
                self.release()

    async def _look(self, launch: int) -> GateSampled:
        port_owner = await self._port_owner()
        lock_owner: ProcessRef | None = None
        try:
            devices = await self._sampler.sample(frozenset())
        except MemoryUnavailable as error:
            return GateSampled(at_ns=boottime_ns(), launch=launch, port_owner=port_owner, memory_error=str(error))
        names = frozenset(device.device for device in devices)
        if names != self._locked:
            self.release()
            try:
                # Not in a thread: a task that is cancelled meanwhile would lose the locks, held for ever by ourselves.
                # It never waits, and the folder is on a tmpfs.
                self._locks = lock_devices(names, lock_dir(self._runtime_dir))
                self._locked = names
            except LockHeld as held:
                lock_owner = held.owner
            except LockError:
                self._locked = names  # no folder for locks: said by preflight; a start must not hang on it
            else:
                # Another daemon may have started an engine between the sample and the lock: look again under it.
                with contextlib.suppress(MemoryUnavailable):
                    devices = await self._sampler.sample(frozenset())
        return GateSampled(
            at_ns=boottime_ns(), launch=launch, devices=devices, port_owner=port_owner, lock_owner=lock_owner
        )
