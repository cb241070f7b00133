"""Strain: pages of /metrics in, `Pressed` and `ReliefJudged` out.

What counts as slow, and when that is worth a restart, is the core's (`core.pressure`, `core.watch`, `core.relief`);
here is what must be remembered between pages and between launches.

A watch runs while a launch serves. Targets are the declared ones, else those learnt at the declared levers, else none.
What was learnt is kept with the policy's fingerprint, what own restarts cost with its surroundings, and what a change
against pressure is measured by with the launch: one value per key, so that nothing can be half written. The rehearsal
runs this very class in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from supervisord_vllm.core.facts import Fact, Pressed, ReliefJudged, Spawned, TreeEnded, Verdict
from supervisord_vllm.core.levers import EAGER, NUM_SEQS
from supervisord_vllm.core.overload import engines_needed
from supervisord_vllm.core.policy import SECOND, Policy, Pressure
from supervisord_vllm.core.pressure import WINDOW_NS, Measure, Sample, verdict_on
from supervisord_vllm.core.relief import Cures, cures, starts_cold
from supervisord_vllm.core.restart_cost import Restarts
from supervisord_vllm.core.state import Launch, State, StateName
from supervisord_vllm.core.watch import Terms, Watch
from supervisord_vllm.engine.metrics import EngineLoad, NoPage

Json = Any
_TARGETS = ("ttft_ns", "inter_token_ns", "queue_ns")


@dataclass(frozen=True, slots=True)
class Strained:
    """How slow the engine is now. ``lost_s`` are outage-equivalent seconds of this episode; at ``worth_s`` a restart
    pays. ``curable``: a permitted change may help. ``origin`` is where the targets come from. ``engines``: how many of
    this size the load of the last five minutes needs. ``missed``: pages in a row that could not be read."""

    origin: Literal["declared", "learnt", "none"] = "none"
    targets: Pressure = Pressure()  # noqa: RUF009 - frozen
    verdict: Verdict | None = None
    curable: bool = False
    loss: float = 0.0
    lost_s: float = 0.0
    worth_s: float = 0.0
    engines: float | None = None
    judging: bool = False
    missed: int = 0


class Strain:
    """``recall`` and ``keep`` read and write one remembered JSON value under a key; ``post`` takes a fact."""

    def __init__(
        self,
        policy: Policy,
        recall: Callable[[str], Json],
        keep: Callable[[str, Json], object],
        post: Callable[[Fact], None],
    ) -> None:
        self._policy = policy
        self._keep = keep
        self._post = post
        self._learnt = _pressure(recall(self._targets_key))
        self._restarts = Restarts.from_json(recall(self._restarts_key))
        self._before = _measure(recall(self._before_key))
        self._number = 0
        self._watch = Watch()
        self._taught = False
        self._missed = 0
        self._asked_of: State | None = None
        self._asked: tuple[int | None, int] = (None, 0)
        self._found: Cures = {}
        self._said_to: State | None = None
        self._said: tuple[Verdict, int] | None = None
        self.view = self._calm()

    @property
    def _targets_key(self) -> str:
        return f"pressure-learnt:{self._policy.fingerprint}"

    @property
    def _before_key(self) -> str:
        return f"pressure-before:{self._policy.fingerprint}"

    @property
    def _restarts_key(self) -> str:
        return f"restarts:{self._policy.surroundings}"

    @property
    def targets(self) -> Pressure:
        """Declared, else learnt, else none."""
        return self._policy.pressure if _any(self._policy.pressure) else self._learnt or self._policy.pressure

    @property
    def _origin(self) -> Literal["declared", "learnt", "none"]:
        if _any(self._policy.pressure):
            return "declared"
        return "learnt" if _any(self.targets) else "none"

    def _calm(self) -> Strained:
        return Strained(self._origin, self.targets)

    def noted(self, before: State, after: State, fact: Fact) -> None:
        """What a step of the state teaches about restarts, and what the next change will be measured by."""
        launch = after.launch
        restarts = self._restarts
        if launch is not None and after.ready and launch.ready_ns == fact.at_ns and not before.ready:
            cold = bool(launch.ledger.numbers.get("compile_cold_s"))
            restarts = restarts.started((fact.at_ns - launch.spawned_ns) / SECOND, cold=cold)
        ending = before.ending
        if isinstance(fact, TreeEnded) and ending is not None and ending.why != "failure" and after.ending is None:
            restarts = restarts.stopped((fact.at_ns - ending.since_ns) / SECOND)
        if restarts is not self._restarts:
            self._restarts = restarts
            self._keep(self._restarts_key, restarts.to_json())
        if isinstance(fact, Spawned) and launch is not None and _on_trial(launch):
            self._keep(self._before_key, asdict(self._before))
        if before.name is StateName.SERVING and after.name is not StateName.SERVING:
            self.view = self._calm()

    def read(self, state: State, page: EngineLoad | NoPage, now_ns: int) -> None:
        """What /metrics of the present launch said at a moment, or that it said nothing."""
        sample = sample_of(page, now_ns) if isinstance(page, EngineLoad) else None
        if sample is None or not isinstance(page, EngineLoad):
            self.missed()
        else:
            self.page(state, sample, page.kv_cache_tokens, page.engines or 1)

    def missed(self) -> None:
        """A page could not be read: no evidence of anything."""
        self._missed += 1
        self._watch = self._watch.missed()
        self.view = replace(self.view, missed=self._missed)

    def page(self, state: State, sample: Sample, kv_tokens: int | None = None, engines: int = 1) -> None:
        """A page of the present launch. ``kv_tokens`` and the sample are sums over so many engines."""
        self._missed = 0
        launch = state.launch
        if launch is None or launch.number != self._number:
            self._number = 0 if launch is None else launch.number
            self._watch, self._taught = Watch(), False
        if launch is None or state.name is not StateName.SERVING:
            return
        sequences = launch.levers.number(NUM_SEQS) or launch.ledger.count(NUM_SEQS)
        held = kv_tokens or launch.ledger.count("kv_tokens")
        terms = Terms(
            self.targets,
            None if sequences is None else sequences * engines,
            held,
            self._cost(cold=False),
            roll_backs=state.roll_backs,
        )
        per_engine = self._watch.sequences(replace(terms, kv_tokens=held and held // engines))
        found = self._cures(state, per_engine, sample.at_ns)
        costs = {verdict: self._cost(cold=True) for verdict, moves in found.items() if starts_cold(moves)}
        terms = replace(terms, costs=costs, curable=frozenset(found))
        self._watch = self._watch.scraped(sample, terms)
        self._learn(launch)
        self._show(launch, terms)
        if _on_trial(launch):
            self._judge(launch, sample.at_ns)
        elif (verdict := self._watch.due(terms)) is not None and self._is_news(state, verdict, sample.at_ns):
            self._say(launch, verdict, terms, per_engine)

    def _cures(self, state: State, sequences: int | None, now_ns: int) -> Cures:
        """What may help: asked anew when the state or the requests changed, and every five minutes (knowledge ages)."""
        asked = (sequences, now_ns // WINDOW_NS)
        if self._asked_of is not state or self._asked != asked:
            self._asked_of, self._asked = state, asked
            self._found = cures(self._policy, state, sequences, now_ns)
        return self._found

    def _is_news(self, state: State, verdict: Verdict, now_ns: int) -> bool:
        """Whether `decide` could say something else than last time: about another state, or after five minutes."""
        said = (verdict, now_ns // WINDOW_NS)
        if self._said_to is state and self._said == said:
            return False
        self._said_to, self._said = state, said
        return True

    def _cost(self, *, cold: bool) -> float:
        return self._restarts.cost_s(self._policy.pressure.cost_ns / SECOND, cold=cold)

    def _learn(self, launch: Launch) -> None:
        if self._taught or _any(self._policy.pressure) or not _as_declared(self._policy, launch):
            return
        learnt = self._watch.baseline(self._policy.pressure)
        if learnt is not None and _any(learnt):
            self._learnt, self._taught = learnt, True
            self._keep(self._targets_key, {name: getattr(learnt, name) for name in _TARGETS})

    def _show(self, launch: Launch, terms: Terms) -> None:
        watch = self._watch
        verdict = watch.episode.verdict or watch.overload.verdict
        curable = verdict in terms.curable
        doubled = 2 ** terms.roll_backs.get(verdict, 0) if verdict is not None and curable else 1
        self.view = Strained(
            self._origin,
            self.targets,
            verdict if watch.lost_s() > 0 else None,
            curable,
            watch.loss,
            watch.lost_s(),
            doubled * (terms.cost_s if verdict is None else terms.cost(verdict)),
            engines_needed(terms.targets, watch.window) if watch.lost_s() > 0 else None,
            _on_trial(launch),
        )

    def _judge(self, launch: Launch, now_ns: int) -> None:
        before, after = self._before, self._watch.served
        verdict = verdict_on(before, after)
        if verdict is None:
            return
        text = f"{_told(after)}, before the change {_told(before)}"
        self._post(ReliefJudged(at_ns=now_ns, launch=launch.number, keep=verdict == "keep", text=text))

    def _say(self, launch: Launch, verdict: Verdict, terms: Terms, sequences: int | None) -> None:
        window, last = self._watch.window, self._watch.window[-1]
        self._before = self._watch.slow
        used = "" if last.kv_usage is None else f", {last.kv_usage:.0%} of the KV cache is used"
        self._post(
            Pressed(
                at_ns=last.at_ns,
                launch=launch.number,
                verdict=verdict,
                loss=round(self._before.loss, 3),
                lost_s=round(self._watch.lost_s(), 1),
                cost_s=round(terms.cost(verdict), 1),
                sequences=sequences,
                text=f"{last.running} run, {last.waiting} wait{used}",
                engines=engines_needed(terms.targets, window),
            )
        )


def sample_of(load: EngineLoad, at_ns: int) -> Sample | None:
    """A page as the core sees it; ``None`` where it does not say how many requests run and wait."""
    if load.running is None or load.waiting is None:
        return None
    return Sample(
        at_ns,
        load.running,
        load.waiting,
        load.kv_usage,
        load.preemptions_total or 0,
        load.prompt_tokens_total or 0,
        load.generation_tokens_total or 0,
        load.request_success_total or 0,
        load.ttft,
        load.inter_token,
        load.queue,
    )


def _told(stretch: Measure) -> str:
    return f"{stretch.loss:.0%} late at {stretch.arrivals:.2g} requests/s"


def _on_trial(launch: Launch) -> bool:
    return launch.probe is not None and launch.probe.verdict is not None


def _as_declared(policy: Policy, launch: Launch) -> bool:
    """Whether nothing that was asked for runs otherwise: what is learnt below would hide the slowness."""
    same = all(launch.levers.get(name) == value for name, value in policy.declared.items())
    return same and not (launch.levers.eager and policy.declared.get(EAGER) is None)


def _any(targets: Pressure) -> bool:
    return any(getattr(targets, name) is not None for name in _TARGETS)


def _pressure(kept: Json) -> Pressure | None:
    """Remembered targets; what cannot be read is forgotten."""
    if not isinstance(kept, dict):
        return None
    numbers = {name: kept.get(name) for name in _TARGETS}
    return Pressure(**{name: ns for name, ns in numbers.items() if type(ns) is int and ns > 0})


def _measure(kept: Json) -> Measure:
    names = ("seconds", "first_tokens", "lost_s", "arrived")
    if not isinstance(kept, dict) or not all(type(kept.get(name)) in (int, float) for name in names):
        return Measure()
    return Measure(**{name: kept[name] for name in names})
