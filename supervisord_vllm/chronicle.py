"""What a run leaves behind: facts, launches and decisions in the store, counts and durations in the metrics."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from typing import Any

from supervisord_vllm import __version__
from supervisord_vllm.api import Exporter
from supervisord_vllm.clock import SECOND_NS
from supervisord_vllm.core import actions as act
from supervisord_vllm.core.adopting import carry
from supervisord_vllm.core.codec import from_json, to_json
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.facts import (
    CanaryDone,
    Commanded,
    DaemonStarted,
    Diagnosed,
    Exited,
    Fact,
    LeftoversReaped,
    ReliefJudged,
    Spawned,
    SpawnFailed,
    TreeEnded,
)
from supervisord_vllm.core.observations import Observation
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import State, StateName
from supervisord_vllm.inheritance import CARRIED, kept
from supervisord_vllm.lasting import HELD, PLANNED, Lasting, counts_key, entries, lasting
from supervisord_vllm.store import Store, durable

FIRST_LAUNCHES = "first_launches"
"""The store's meta value: numbers of launches with which incidents began, ascending."""


class Chronicle:
    """Writes one run of the daemon down; decides nothing. ``earlier`` is the last decision of the runs before."""

    def __init__(self, store: Store, exporter: Exporter, policy: Policy) -> None:
        self._store = store
        self._exporter = exporter
        self._policy = policy
        self._run = 0
        self._boot_id = ""
        self._begun = False
        self._newest = State.initial()
        self._carrying = False
        self._open: list[int] = []
        self._outcomes: dict[int, str] = {}
        self._failed_ns: int | None = None
        self.earlier = store.earlier

    def begin(self, boot_id: str) -> None:
        """A daemon run begins."""
        self._boot_id = boot_id
        self._run = self._store.start_run(self._policy, __version__, boot_id)

    @property
    def _observed(self) -> str:
        return f"observations:{self._policy.surroundings}"

    def observations(self) -> tuple[Observation, ...]:
        """What earlier runs learnt of lever vectors in these surroundings; what cannot be read is forgotten."""
        kept = self._store.get_meta(self._observed)
        found: list[Observation] = []
        for entry in kept if isinstance(kept, list) else []:
            with contextlib.suppress(ValueError):
                found.append(from_json(Observation, entry))
        return tuple(found)

    def lasting(self, now_ns: int, wall_s: int) -> Lasting:
        """The hold and the counts that earlier runs left."""
        meta = self._store.get_meta
        counts = meta(counts_key(self._policy.fingerprint))
        return lasting(meta(HELD), counts, meta(PLANNED), boot_id=self._boot_id, now_ns=now_ns, wall_s=wall_s)

    def carry(self, state: State, *, wanted: bool) -> Future[bool] | None:
        """Keep the state for the next daemon. ``wanted``: the future tells when it is on the disk; else the newest one
        is written soon."""
        self._newest = state
        if wanted:
            return self._store.keep(CARRIED, self._carried, wanted=True)
        if not self._carrying:
            self._carrying = True
            self._store.keep(CARRIED, self._carried, wanted=False)
        return None

    def _carried(self) -> dict[str, Any]:
        self._carrying = False  # before the look at the newest: what comes now asks for another turn
        return kept(carry(self._newest), self._boot_id)

    def end(self) -> None:
        """The run ends as it should: there is nothing to go on with."""
        self._store.set_meta(CARRIED, None)

    def left(self) -> object:
        """What the daemon before kept by `carry`."""
        return self._store.get_meta(CARRIED)

    def first_launches(self, number: int, launches: int) -> frozenset[int]:
        """The launches with which incidents began, as far as known: that of the present one, which launch ``number`` is
        the ``launches``-th of, and of the last hundred. An incident begins with the launch that failed before it, or
        with its own first.
        """
        kept = self._store.get_meta(FIRST_LAUNCHES)
        known = [known for known in kept if isinstance(known, int)] if isinstance(kept, list) else []
        if launches > 1:
            began = [first for first in (number - launches, number - launches + 1) if first > 0 and first not in known]
            if began:
                known = [*known, *began][-100:]
                self._store.set_meta(FIRST_LAUNCHES, known)
        return frozenset(known)

    def record(self, fact: Fact) -> None:
        """Keep a fact for replay."""
        self._store.record_fact(self._run, fact)

    def outcome(self, number: int) -> str | None:
        """What came of a decision of this run, once that is known."""
        return self._outcomes.get(number)

    async def decided(self, decision: Decision) -> bool:
        """Record an intent, at most 2 s long; whether it is on the disk. The decision before it is complete."""
        self.complete(f"followed by decision {decision.number}")
        self._exporter.decided(decision)
        recorded = await durable(self._store.record_decision(decision))
        if decision.acted:
            self._open.append(decision.number)
            if not recorded:
                self._store.complete_decision(decision.number, "acted on before it was recorded", unrecorded=True)
        else:
            self._say(decision.number, "only said: act = false")
        return recorded

    def complete(self, outcome: str) -> None:
        """Say what came of the decisions that are open."""
        for number in self._open:
            self._say(number, outcome)
        self._open.clear()

    def _say(self, number: int, outcome: str) -> None:
        self._outcomes = {number: outcome}
        self._store.complete_decision(number, outcome)

    def proven(self, action: act.Proven) -> None:
        """A launch passed its proof."""
        self._store.launch_proven(action.launch, action.target, self._policy.fingerprint, good=action.good)
        self._store.clear_exhausted()
        self.complete(f"launch {action.launch} is proven")

    def gave_up(self, action: act.GiveUp) -> None:
        """Nothing automatic is right any more."""
        if action.exhausted_until_ns is not None:
            self._store.set_exhausted(self._policy.fingerprint, action.text, action.exhausted_until_ns)
        self.complete("gave up")

    def _keep_lasting(self, after: State, fact: Fact) -> None:
        """What outlives a boot, whenever it changed; before the first fact the state does not know it yet."""
        self._begun = self._begun or isinstance(fact, DaemonStarted)
        if not self._begun:
            return
        for key, value in entries(after, self._boot_id, self._policy.fingerprint).items():
            if self._store.get_meta(key) != value:
                self._store.set_meta(key, value)

    def _take_up(self, after: State) -> None:
        """The daemon before us did not live to see what came of its last decision."""
        decision, launch = after.last_decision, after.launch
        if decision is not None and decision.acted and not (launch is not None and launch.proven):
            self._open = [decision.number]

    def note(self, before: State, after: State, fact: Fact) -> None:
        """What one fact means for the launches' records and the durations."""
        store = self._store
        self._keep_lasting(after, fact)
        if isinstance(fact, Commanded) and fact.verb == "reset":
            store.clear_exhausted()
            store.forget_good(self._policy.fingerprint)
        if after.observations is not before.observations and not isinstance(fact, DaemonStarted):
            store.set_meta(self._observed, [to_json(seen) for seen in after.observations])
        if isinstance(fact, Commanded) and fact.verb == "start" and after.name is not before.name:
            store.clear_exhausted()
        if isinstance(fact, DaemonStarted) and fact.carried is not None:
            self._take_up(after)
        if isinstance(fact, LeftoversReaped) and not fact.survivors:
            store.leftovers_ended()
        self._of_launch(before, after, fact)

    def _of_launch(self, before: State, after: State, fact: Fact) -> None:
        """What a fact of the present launch means."""
        store, launch = self._store, before.launch
        if launch is None or fact.launch not in (0, launch.number):
            return
        if isinstance(fact, ReliefJudged):
            change = before.last_decision
            if fact.keep and launch.probe is not None and change is not None and change.moves:
                self._say(change.number, f"kept: {fact.text}")
        elif isinstance(fact, Spawned):
            store.launch_started(
                launch.number, launch.levers, fact.argv, fact.pid, fact.log, fingerprint=self._policy.fingerprint
            )
        elif isinstance(fact, SpawnFailed):
            store.launch_started(launch.number, launch.levers, (), None, "", fingerprint=self._policy.fingerprint)
            store.launch_ended(launch.number, "could not be executed")
        elif isinstance(fact, CanaryDone) and after.ready and not before.ready:
            store.launch_ready(launch.number)
            self._exporter.started((fact.at_ns - launch.spawned_ns) / SECOND_NS)
            if self._failed_ns is not None:
                self._exporter.recovered((fact.at_ns - self._failed_ns) / SECOND_NS)
                self._failed_ns = None
        elif isinstance(fact, Diagnosed) and before.ending is not None and before.ending.why == "failure":
            judged = after.last_decision
            self._exporter.failed(judged.kind if judged is not None else fact.diagnosis.kind)
        elif isinstance(fact, TreeEnded) and before.ending is not None:
            ended = launch.exited or Exited(at_ns=fact.at_ns)
            judged = after.last_decision if before.ending.why == "failure" else None
            outcome = judged.kind.value if judged is not None and judged.launch == launch.number else "stopped"
            store.launch_ended(launch.number, outcome, code=ended.code, signal=ended.signal)
        ending = after.ending
        if before.name is not StateName.STOPPING and ending is not None and ending.why == "failure":
            self._failed_ns = self._failed_ns or fact.at_ns
