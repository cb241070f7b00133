"""The shell's side of a proof: the soak's samples, the answer to `Weigh`, and what people are told of its progress.

It decides nothing. The journal gets one line when a burst is over and one when a soak finds something; systemd's status
line and a terminal follow the progress in steps of a quarter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import structlog

from supervisord_vllm.clock import boottime_ns
from supervisord_vllm.core import actions as act
from supervisord_vllm.core import proof
from supervisord_vllm.core.facts import BurstDone, DeviceMemory, Fact, SoakDone
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.soaking import Soaking
from supervisord_vllm.core.state import State, StateName
from supervisord_vllm.proof_bars import line, percents
from supervisord_vllm.proof_progress import Flying, document

STEP = 25
"""Percent of progress between two lines about it."""


class Memory(Protocol):
    """What samples device memory."""

    error: str | None

    async def once(self) -> object:
        """One sample; everybody who listens gets it."""


class ProofWatch:
    """One daemon's proofs, one after the other. ``flying`` tells of the burst of the present launch."""

    def __init__(
        self,
        policy: Policy,
        memory: Memory,
        post: Callable[[Fact], None],
        state: Callable[[], State],
        flying: Callable[[], Flying | None],
        told: Callable[[], object],
        failed: Callable[[proof.Part], object],
        *,
        terminal: bool = False,
    ) -> None:
        self._policy = policy
        self._memory = memory
        self._post = post
        self._state = state
        self._flying = flying
        self._told = told
        self._failed = failed
        self._terminal = terminal
        self._soaking = Soaking()
        self._of = 0
        self._shown: tuple[int, ...] = ()
        self._log = structlog.get_logger()

    def noted(self, before: State, after: State, fact: Fact) -> None:
        """A fact was decided upon."""
        launch, ending = after.launch, after.ending
        if launch is None:
            return
        proving = before.name is StateName.PROVING and before.launch is not None
        if proving and before.launch is not None and ending is not None and ending.why == "failure":
            self._failed(proof.part(self._policy, before.launch))
        if isinstance(fact, BurstDone) and before.launch is not None and before.launch.burst is not launch.burst:
            say = self._log.info if fact.ok else self._log.warning
            say(
                f"burst: {fact.answered} of {fact.requests} requests at once were answered",
                launch=launch.number,
                failed=fact.failed,
                refused=fact.refused,
                real=fact.real,
                seconds=round(fact.seconds, 2),
                first_token_s=fact.first_token_s,
                detail=fact.detail or None,
            )
        shown = self.document()
        if isinstance(fact, SoakDone) and shown is not None and shown["soak"]["finding"] is not None:
            self._log.warning(f"soak: {shown['soak']['finding']}", launch=launch.number)
        self.moved()

    def sampled(self, devices: tuple[DeviceMemory, ...]) -> None:
        """A sample of device memory; those of a soak are kept."""
        state = self._state()
        launch = state.launch
        if state.name is not StateName.PROVING or launch is None or launch.soak is not None:
            return
        began = proof.soak_began_ns(self._policy, launch)
        if began is None:
            return
        if self._of != launch.number:
            self._of, self._soaking = launch.number, Soaking()
        self._soaking = self._soaking.sampled(boottime_ns(), devices)
        self.moved()

    async def weigh(self, action: act.Weigh) -> None:
        """What memory did since the soak began, with one more look."""
        try:
            await self._memory.once()
        finally:
            seen = self._soaking.devices if self._of == action.launch else ()
            error = self._memory.error if not seen else None
            self._post(SoakDone(at_ns=boottime_ns(), launch=action.launch, devices=seen, error=error))

    def document(self) -> dict[str, Any] | None:
        """The ``proof`` object of the status document."""
        state = self._state()
        number = state.launch.number if state.launch is not None else 0
        devices = self._soaking.devices if self._of == number else ()
        return document(self._policy, state, boottime_ns(), self._flying(), devices)

    def moved(self) -> None:
        """Something may have gone on: a terminal and systemd are told of every quarter."""
        shown = self.document()
        if shown is None or self._state().name is not StateName.PROVING:
            self._shown = ()
            return
        steps = tuple(percent // STEP for percent in percents(shown).values())
        if steps == self._shown:
            return
        first, self._shown = not self._shown, steps
        self._told()
        if self._terminal and not first:
            self._log.info(line(shown))
