"""The proof of a launch in virtual time: what its course answers to canary and burst, and what its soak weighs."""

from __future__ import annotations

from collections.abc import Iterator

from supervisord_vllm.core import actions as act
from supervisord_vllm.core.facts import BurstDone, CanaryDone, DeviceMemory, Fact, SoakDone
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.proof import MOST_REQUESTS
from supervisord_vllm.core.soaking import Soaking
from supervisord_vllm.simulation.virtual import Course

ANSWER_S = 0.3
"""A request of one token."""
SILENCE_S = 30.0
"""How long a canary waits for its first byte."""
BURST_S = 2.0
Coming = Iterator[tuple[float, Fact]]
"""Facts, each with the seconds until it comes."""


def burst_size(policy: Policy, slots: int) -> int:
    """Requests of the burst that a launch with so many slots gets; 0: none."""
    if policy.proof is None:
        return 0
    return min(slots, MOST_REQUESTS) if policy.proof.concurrency is None else policy.proof.concurrency


def canary(launch: int, course: Course, at_s: float) -> Coming:
    """What comes of the first request: an answer, silence, or nothing, where the engine dies of it."""
    if not course.canary or (_strikes(course, at_s, ANSWER_S) and _hangs(course)):
        yield SILENCE_S, CanaryDone(at_ns=0, launch=launch, ok=False, detail="no byte in 30 s")
    elif not _strikes(course, at_s, ANSWER_S):
        yield ANSWER_S, CanaryDone(at_ns=0, launch=launch, ok=True, first_token_s=ANSWER_S)


def burst(action: act.Burst, course: Course, at_s: float) -> Coming:
    """What comes of the burst; of one that hangs nothing, its engine is ended before."""
    requests = action.requests
    if not _strikes(course, at_s, BURST_S):
        yield (
            BURST_S,
            BurstDone(at_ns=0, launch=action.launch, ok=True, requests=requests, answered=requests, seconds=BURST_S),
        )
    elif not _hangs(course):
        after = (course.strikes_s or at_s) - at_s
        yield (
            after,
            BurstDone(
                at_ns=0,
                launch=action.launch,
                ok=False,
                requests=requests,
                failed=requests,
                seconds=after,
                detail="500 EngineCore encountered an issue",
            ),
        )


def _strikes(course: Course, at_s: float, within_s: float) -> bool:
    return course.strikes_s is not None and at_s <= course.strikes_s <= at_s + within_s


def _hangs(course: Course) -> bool:
    return course.failure is not None and course.failure.kind == "engine_hung"


class Scale:
    """Weighs a soak by its first and its last moment, between which virtual memory is still."""

    def __init__(self) -> None:
        self._soaking = Soaking()

    def begins(self, at_ns: int, devices: tuple[DeviceMemory, ...]) -> None:
        """The soak begins."""
        self._soaking = Soaking().sampled(at_ns, devices)

    def weighed(self, launch: int, at_ns: int, devices: tuple[DeviceMemory, ...]) -> SoakDone:
        """The soak is over."""
        return SoakDone(at_ns=0, launch=launch, devices=self._soaking.sampled(at_ns, devices).devices)
