"""Replay: the recorded facts of a run, through the same policy, give every recorded decision again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Action, Diagnosis, Kind
from supervisord_vllm.core.facts import Diagnosed, Fact, Tick
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.replay import replay
from supervisord_vllm.store import History, Store, StoreError


@dataclass(frozen=True)
class Decide:
    """Stands for `core.actions.Decide`: replay looks at the decision that an action carries, not at its class."""

    decision: Decision


@dataclass(frozen=True)
class Spawn:
    """An action that carries none."""

    launch: int


def count(policy: Policy, state: int, fact: Fact) -> tuple[int, Sequence[object]]:
    """A core that stops after ``max_launches`` diagnoses."""
    if not isinstance(fact, Diagnosed):
        return state, [Spawn(state)]
    action = Action.STOP_EXPLAIN if state >= policy.max_launches else Action.RESTART_SAME
    decision = Decision(
        state, fact.at_ns, fact.launch, fact.diagnosis.kind, action, f"{state} of {policy.max_launches}"
    )
    return state + 1, [Decide(decision), Spawn(state)]


def test_replay_gives_every_recorded_decision_and_another_policy_gives_others(tmp_path: Path) -> None:
    warnings: list[str] = []
    store = Store.open(tmp_path / "history.sqlite3", warn=warnings.append)
    policy = Policy(name="qwen", max_launches=3)
    state, last = 1, None
    for run_policy in (Policy(name="earlier"), policy):
        run = store.start_run(run_policy, "0.1.0", "boot")
    for at_ns in range(40):
        fact: Fact = (
            Tick(at_ns=at_ns)
            if at_ns % 10
            else Diagnosed(at_ns=at_ns, launch=1, diagnosis=Diagnosis(Kind.ENGINE_DEAD, numbers={"x_gib": 0.1}))
        )
        store.record_fact(run, fact)
        state, actions = count(policy, state, fact)
        for action in actions:
            if isinstance(action, Decide):
                last = store.record_decision(action.decision)
    assert last is not None
    assert last.result(20)
    assert store.close()

    history = History.open(tmp_path / "history.sqlite3")
    assert history is not None
    recorded = [record.decision() for record in history.decisions(run=run)]
    assert len(recorded) == 4
    assert replay(history, run, None, count, 1) == recorded
    assert replay(history, run, policy, count, 1) == recorded
    assert replay(history, run, Policy(name="qwen", max_launches=9), count, 1) != recorded
    with pytest.raises(StoreError, match="has no run 7"):
        replay(history, 7, None, count, 1)
    history.close()
    assert warnings == []
