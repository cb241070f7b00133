"""Device memory while the daemon runs: sampled for the status page, for the verdict on a death, for the way back up.

The gate samples for itself. Only what changes something is a fact: memory that cannot be read any more or again, a
device that vanished, room beside an engine that a neighbour had lowered, and own memory that creeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from supervisord_vllm.clock import boottime_ns
from supervisord_vllm.core.climbing import room_matters
from supervisord_vllm.core.creep import CreepWatch, creep_matters
from supervisord_vllm.core.facts import CreepSeen, DeviceMemory, DevicesSeen, Fact, RoomSeen
from supervisord_vllm.core.levers import UTILIZATION
from supervisord_vllm.core.state import State, StateName
from supervisord_vllm.host.memory import MemoryUnavailable, Sampler

MEMORY_EVERY_S = 2.0
"""Between two samples of device memory while an engine lives."""
IDLE_MEMORY_EVERY_S = 10.0
SETTLE_S = 2.0
"""A dead engine's memory is given back within this, or what is missing belongs to somebody else."""
SETTLE_STEP_S = 0.02
STILL_BYTES = 64 << 20
"""Two samples that differ by less show that nothing is being given back any more."""


class Owner(Protocol):
    """Whose processes count as our own in a sample."""

    def own_pids(self) -> frozenset[int]:
        """The processes that are proven ours; reads /proc, so it is called in a thread."""


class MemoryWatch:
    """Samples again and again (`watch`); ``error`` says why memory cannot be read, if so."""

    def __init__(
        self,
        sampler: Sampler,
        post: Callable[[Fact], None],
        state: Callable[[], State],
        owner: Callable[[], Owner | None],
    ) -> None:
        self.error: str | None = None
        self.listener: Callable[[tuple[DeviceMemory, ...]], None] = lambda _: None
        self.own_pids: frozenset[int] = frozenset()
        self.creep = CreepWatch()
        self._sampler = sampler
        self._post = post
        self._state = state
        self._owner = owner
        self._devices: frozenset[str] = frozenset()
        self._log = structlog.get_logger()

    @property
    def last(self) -> tuple[DeviceMemory, ...]:
        """The last sample; empty where there is none."""
        return self._sampler.last or ()

    async def watch(self) -> None:
        """Sample for ever, except in front of the gate."""
        while True:
            owner = await self.once()
            await asyncio.sleep(MEMORY_EVERY_S if owner is not None else IDLE_MEMORY_EVERY_S)

    async def once(self) -> Owner | None:
        """One sample, and what it says; whose it was."""
        owner = self._owner()
        if self._state().name is not StateName.GATING:
            devices = await self._sample(owner)
            self._tell_room(devices)
            await self._tell_creep(devices)
            self.listener(devices)
        return owner

    async def settled(self) -> tuple[DeviceMemory, ...]:
        """Memory once a dead engine's share was given back: two samples alike, at most `SETTLE_S` later."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_S
        devices = await self._sample(None)
        while devices and loop.time() < deadline:
            await asyncio.sleep(SETTLE_STEP_S)
            earlier, devices = devices, await self._sample(None)
            moved = [abs(a.free_bytes - b.free_bytes) for a, b in zip(earlier, devices, strict=False)]
            if all(amount < STILL_BYTES for amount in moved):
                break
        return devices

    def _tell_room(self, devices: tuple[DeviceMemory, ...]) -> None:
        """A sample beside a serving engine is a fact only where it changes what would fit."""
        state = self._state()
        if state.launch is not None and devices and room_matters(state, devices):
            self._post(RoomSeen(at_ns=boottime_ns(), launch=state.launch.number, devices=devices))

    async def _tell_creep(self, devices: tuple[DeviceMemory, ...]) -> None:
        """Own memory of a serving engine that begins or ends to creep, or does so at another rate, is a fact."""
        state = self._state()
        launch = state.launch
        if state.name is not StateName.SERVING or launch is None or launch.ready_ns is None or not devices:
            return
        now, utilization = boottime_ns(), launch.levers.number(UTILIZATION)
        # In a thread: every ten minutes the slopes of a day's samples take 10 ms a device.
        self.creep = await asyncio.to_thread(
            self.creep.sampled, now, launch.number, launch.ready_ns, devices, utilization
        )
        # Without an estimate there is nothing to say: a daemon that was replaced begins to watch anew.
        told = self._state().launch
        if told is None or told.number != launch.number or not self.creep.growth:
            return
        if creep_matters(told.growth, self.creep.creep):
            self._post(CreepSeen(at_ns=now, launch=launch.number, growth=self.creep.creep))

    async def _sample(self, owner: Owner | None) -> tuple[DeviceMemory, ...]:
        own = await asyncio.to_thread(owner.own_pids) if owner is not None else frozenset()
        if own:
            self.own_pids = own
        try:
            devices = await self._sampler.sample(own)
        except MemoryUnavailable as error:
            if self.error is None:
                self._log.warning("device memory cannot be read", error=str(error))
                self._post(DevicesSeen(at_ns=boottime_ns(), error=str(error), vanished=error.vanished))
            self.error = str(error)
            return ()
        names = frozenset(device.device for device in devices)
        if gone := self._devices - names:
            text = f"{', '.join(sorted(gone))} is no longer there"
            self._log.error("a device vanished", devices=sorted(gone))
            self._post(DevicesSeen(at_ns=boottime_ns(), error=text, vanished=True))
            self.error = text
        self._devices = names
        if gone:
            return devices
        if self.error is not None:
            self._log.info("device memory can be read again")
            self._post(DevicesSeen(at_ns=boottime_ns(), error=None))
        self.error = None
        return devices
