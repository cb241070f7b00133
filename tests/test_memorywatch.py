"""What the watch of device memory says of a serving engine."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from supervisord_vllm import memorywatch
from supervisord_vllm.core.creep import EVERY_NS, LEAST, SETTLING_NS, Growth
from supervisord_vllm.core.facts import CreepSeen, DeviceMemory, Fact
from supervisord_vllm.core.ledger import GIB, MIB
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import Launch, State, StateName
from supervisord_vllm.host.memory import Sampler
from supervisord_vllm.memorywatch import MemoryWatch

LEVERS = Levers({"gpu_memory_utilization": 800})


class Card:
    """A sampler whose card is as the test says."""

    def __init__(self) -> None:
        self.own = 60 * GIB
        self.last: tuple[DeviceMemory, ...] = ()

    async def sample(self, own: frozenset[int]) -> tuple[DeviceMemory, ...]:
        self.last = (DeviceMemory("GPU-0", 80 * GIB, 80 * GIB - self.own, GIB, self.own),)
        return self.last


class Process:
    def own_pids(self) -> frozenset[int]:
        return frozenset({4})


def test_memory_that_creeps_for_hours_is_a_fact_once_and_its_end_another(monkeypatch: pytest.MonkeyPatch) -> None:
    card, posted, now = Card(), [], [0]
    state = State(StateName.SERVING, launch=Launch(1, LEVERS, LEVERS, 0, ready_ns=0, ready=True))

    def post(fact: Fact) -> None:
        nonlocal state
        posted.append(fact)
        state, _ = decide(Policy("p"), state, fact)

    async def lived(steps: list[int]) -> None:
        for step in steps:
            now[0] += EVERY_NS
            card.own += step
            await watch.once()

    monkeypatch.setattr(memorywatch, "boottime_ns", lambda: now[0])
    watch = MemoryWatch(cast("Sampler", card), post, lambda: state, Process)
    now[0] = SETTLING_NS
    asyncio.run(lived([50 * MIB] * (LEAST + 30)))
    (seen,) = posted
    assert isinstance(seen, CreepSeen)
    assert seen.growth is not None
    assert seen.growth.per_hour == 300 * MIB
    assert state.launch is not None
    assert state.launch.growth == seen.growth
    asyncio.run(lived([-30 * GIB]))  # it sleeps
    assert isinstance(posted[-1], CreepSeen)
    assert posted[-1].growth is None
    assert len(posted) == 2
    state = State(StateName.SERVING, launch=Launch(2, LEVERS, LEVERS, 0, ready_ns=now[0], ready=True))
    asyncio.run(lived([500 * MIB] * (LEAST - 1)))
    assert len(posted) == 2, "another launch is watched anew"


def test_a_daemon_that_watches_anew_does_not_take_back_what_the_one_before_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    card, posted = Card(), cast("list[Fact]", [])
    monkeypatch.setattr(memorywatch, "boottime_ns", lambda: 10 * SETTLING_NS)
    seen = Growth("GPU-0", 1, MIB, MIB, MIB, 1, GIB, GIB)
    state = State(StateName.SERVING, launch=Launch(1, LEVERS, LEVERS, 0, ready_ns=0, ready=True, growth=seen))
    watch = MemoryWatch(cast("Sampler", card), posted.append, lambda: state, Process)
    asyncio.run(watch.once())
    assert posted == []
