"""Seeded days on the simulated card: random policies, neighbours, faults and operators, and the rules that always hold.

As a script it plays a range of seeds, resumably, and records the ranges that are done:
``python tests/simulated_days.py --days 10000 --record docs/long-runs.md``; ``--show SEED`` prints one day's story.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from supervisord_vllm.core import actions as act
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.knowledge import known
from supervisord_vllm.core.levers import Levers, Rung, Weights
from supervisord_vllm.core.policy import SECOND, Policy, Proof
from supervisord_vllm.core.remedies import pinned
from supervisord_vllm.rehearsal.play import Play
from supervisord_vllm.rehearsal.story import story
from supervisord_vllm.simulation.card import read_card
from supervisord_vllm.simulation.fault import Fault
from supervisord_vllm.simulation.virtual import Neighbour, Neighbours
from supervisord_vllm.simulation.virtual_scenario import Operator, Scenario

GIB = 1 << 30
DAY_S = 86400.0
H200 = read_card("h200")
SERVED = "Qwen/Qwen2.5-7B-Instruct"


def policy_of(rng: random.Random) -> Policy:
    """A policy with some of the rungs."""
    util = rng.choice((800, 900, 950))
    declared = Levers(
        {
            "gpu_memory_utilization": util,
            "max_model_len": rng.choice((8192, 32768, 131072)),
            "max_num_seqs": rng.choice((16, 64, 256)),
            "weights": Weights(SERVED),
        }
    )
    rungs = (
        Rung("gpu_memory_utilization", step=50, min=rng.choice((400, 700)), max=rng.choice((util, 970))),
        Rung("max_num_seqs", factor=0.5, min=4, max=rng.choice((None, 256))),
        Rung("max_model_len", min=4096),
        Rung("enforce_eager"),
        Rung("weights", use=(Weights(f"{SERVED}-AWQ", "awq_marlin"),)),
    )
    return Policy(
        "day",
        declared,
        tuple(rung for rung in rungs if rng.random() < 0.8),
        on_give_up=rng.choice(("exit", "stay")),
        act=rng.random() < 0.95,
        step_up_ns=rng.choice((600, 1800)) * SECOND,
        planned_per_day=rng.choice((0, 2, 4)),
        allow=frozenset({"expandable-segments"}) if rng.random() < 0.5 else frozenset(),
        proof=Proof(),
    )


def scenario_of(rng: random.Random, seed: int) -> Scenario:
    """A day with up to six neighbours, six faults and some operators."""
    total = rng.choice((22.5, 24.0, 40.0, 80.0, 139.8))
    card = replace(H200, device=replace(H200.device, total=int(total * GIB), reserved=0))
    neighbours = tuple(
        Neighbour(
            at := rng.uniform(0, DAY_S),
            int(total * rng.choice((0.05, 0.1, 0.3, 0.6)) * GIB),
            None if rng.random() < 0.2 else at + rng.choice((30, 600, 7200)),
            2700 + number,
        )
        for number in range(rng.randrange(6))
    )
    kinds = (
        ("die", "running"), ("hang", "running"), ("oom", "running"), ("cuda-fault", "running"), ("unknown", "running"),
        ("fragmentation", "running"), ("host-oom", "running"), ("xid", "running"), ("exit", "running"),
        ("oom", "capture"), ("oom", "kv-alloc"), ("oom", "loading"), ("oom", "warm-up"), ("hang", "loading"),
        ("exit", "profiling"), ("hub-outage", ""), ("corrupt-cache", ""), ("lying-health", ""), ("orphan", ""),
        ("slow-start", ""), ("swallow-term", ""),
    )  # fmt: skip
    faults = []
    for _ in range(rng.randrange(7)):
        kind, stage = rng.choice(kinds)
        launches = tuple(range(first := rng.randrange(1, 8), first + rng.choice((1, 1, 3, 50))))
        after = rng.choice((10.0, 300.0, 5000.0)) if stage == "running" else None
        faults.append(
            Fault(kind, launches, stage, after=after, bytes=int(rng.uniform(0.02, 2) * GIB), seconds=20.0, code=79)
        )
    operators = tuple(
        Operator(rng.uniform(0, DAY_S), rng.choice(("hold", "resume", "restart", "stop", "start", "drain", "reset")))
        for _ in range(rng.choice((0, 0, 2, 5)))
    )
    return Scenario(
        f"day-{seed}",
        "a random day",
        card,
        DAY_S,
        Neighbours(neighbours),
        tuple(faults),
        operators,
    )


@dataclass
class Checked(Play):
    """A play that checks each spawn and each decision as it is made. Two engines at once fail in `Play` itself."""

    def _spawn(self, action: act.Spawn) -> None:
        within_bounds(self.policy, action.levers)
        before = self.launches[-1].levers if self.launches else None
        operated = any(one.at_s <= self.seconds for one in self.scenario.operators)
        # An operator's start asks for what is declared, whatever was observed; what stays the same is no attempt.
        if before is not None and before != action.levers and not operated and self.policy.act:
            launch = self.state.launch
            assert launch is not None
            seen = known(self.policy, self.state, self.now).against(pinned(action.levers, launch.ledger))
            assert seen is None, f"launch {action.launch} is known to fail: {seen}"
        super()._spawn(action)


def within_bounds(policy: Policy, levers: Levers) -> None:
    """No lever outside its rung, none touched that is not declared movable."""
    for name, value in levers.items():
        declared, rung = policy.declared.get(name), policy.rung(name)
        if value == declared:
            continue
        if rung is None:
            # vLLM's own choice, made explicit after a failure, is no move.
            assert declared is None, f"{name} = {value} although it is not movable"
            continue
        number = levers.number(name)
        if number is not None and declared is not None:
            assert rung.min is None or number >= rung.min, f"{name} = {number} is below {rung.min}"
            most = rung.max if rung.max is not None else policy.declared.number(name)
            assert most is None or number <= most, f"{name} = {number} is above {most}"
        if rung.use:
            assert value in rung.use, f"{name} = {value} is no declared alternative"


def day(seed: int, every_s: float | None = None) -> Checked:
    """One day, checked."""
    rng = random.Random(seed)
    played = Checked(policy_of(rng), scenario_of(rng, seed), every_s).run()
    check(played)
    return played  # type: ignore[return-value]  # `run` returns itself


def check(play: Play) -> None:
    """What must hold of a whole day."""
    policy = play.policy
    decisions = [judged.decision for judged in play.decisions]
    assert [d.number for d in decisions] == list(range(1, len(decisions) + 1))
    for decision in decisions:
        assert decision.sentence.isprintable(), decision.sentence
        assert "`vllm-supervise " in decision.sentence or "start the daemon" in decision.sentence, decision.sentence
        assert decision.then in ("", *(state for state in STATES)), decision.then
    _causes(play)
    restarts = [j.at_s for j in play.decisions if j.decision.action in (Action.RESTART_SAME, Action.KILL_TREE_RESTART)]
    if not any(operator.verb in ("start", "reset", "restart") for operator in play.scenario.operators):
        for at in restarts:
            recent = [other for other in restarts if at - policy.window_ns / SECOND < other <= at]
            assert len(recent) <= policy.budget, f"{len(recent)} same-again restarts in one window at {at}"
    planned = [j.at_s for j in play.decisions if _climbs(j.decision) and j.decision.acted]
    # A reset forgets the count; a hold that takes a change back while it drains gives its restart back.
    if not any(operator.verb in ("reset", "hold") for operator in play.scenario.operators):
        assert len(planned) <= policy.planned_per_day, f"{len(planned)} planned restarts in a day"
    for judged in play.decisions:
        if _climbs(judged.decision):
            launch = next(one for one in play.launches if one.number == judged.decision.launch)
            assert launch.proven_s is not None, "a step up from what is not proven"
            assert judged.at_s - launch.proven_s >= policy.step_up_ns / SECOND - 1e-6, "a step up too soon"
            assert not judged.decision.acted or play.policy.act
    if play.state.name.value == "given-up":
        assert play.given_up


STATES = (
    "adopting",
    "stopped",
    "gating",
    "starting",
    "proving",
    "serving",
    "draining",
    "stopping",
    "backing-off",
    "given-up",
)


def _climbs(decision: Decision) -> bool:
    return decision.kind is Kind.NONE and "step up" in decision.sentence


def _causes(play: Play) -> None:
    """Every launch with other levers than the one before has a decision, or is what was asked for again."""
    for before, after in zip(play.launches, play.launches[1:], strict=False):
        if before.levers == after.levers:
            continue
        caused = any(before.at_s <= judged.at_s <= after.at_s for judged in play.decisions)
        operated = any(before.at_s <= one.at_s <= after.at_s for one in play.scenario.operators)
        assert caused or operated, f"launch {after.number} changed without a cause"


# --- long runs ---

_RANGE = re.compile(r"^\| (\d+)–(\d+) \|", re.MULTILINE)


def done(record: Path) -> list[tuple[int, int]]:
    """Seed ranges that the record says are done."""
    text = record.read_text(encoding="utf-8") if record.is_file() else ""
    return sorted((int(first), int(last)) for first, last in _RANGE.findall(text))


def missing(record: Path, days: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges that are still to be played."""
    ranges = done(record)
    for first in range(0, days, size):
        last = min(first + size, days) - 1
        if not any(low <= first and last <= high for low, high in ranges):
            yield first, last


def main() -> int:
    """Play what is missing; 1 at the first violation, with its story."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--record", type=Path, required=False)
    parser.add_argument("--show", type=int)
    options = parser.parse_args()
    if options.show is not None:
        print(story(day(options.show)))
        return 0
    record: Path = options.record or Path("docs/long-runs.md")
    for first, last in list(missing(record, options.days, options.size)):
        began = time.perf_counter()
        for seed in range(first, last + 1):
            try:
                day(seed)
            except AssertionError as error:
                print(f"seed {seed}: {error}\n\n{_story_of(seed)}")
                return 1
        took = time.perf_counter() - began
        with record.open("a", encoding="utf-8") as file:
            file.write(f"| {first}–{last} | no violation | {took:.0f} s | {time.strftime('%Y-%m-%d')} |\n")
        print(f"{first}–{last}: no violation, {took:.0f} s", flush=True)
    return 0


def _story_of(seed: int) -> str:
    rng = random.Random(seed)
    play = Play(policy_of(rng), scenario_of(rng, seed)).run()
    return f"{play.policy}\n{story(play)}"


if __name__ == "__main__":
    sys.exit(main())
