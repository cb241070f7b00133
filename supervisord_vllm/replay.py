"""Replay: the recorded facts of one run through a policy give the decisions again.

With the run's own policy every decision must come out as recorded (that is the test of the core's purity); with another
policy it says what that one would have decided. The core is passed in, because replay judges it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.facts import Fact
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.store.history import History

State = TypeVar("State")
Decide = Callable[[Policy, State, Fact], "tuple[State, Iterable[Any]]"]


def replay_facts(facts: Iterable[Fact], policy: Policy, decide: Decide[State], initial: State) -> list[Decision]:
    """Fold facts through ``decide``; every action that carries a ``decision`` (`core.actions.Decide`) counts."""
    state, decisions = initial, []
    for fact in facts:
        state, actions = decide(policy, state, fact)
        carried = (getattr(action, "decision", None) for action in actions)
        decisions += [decision for decision in carried if isinstance(decision, Decision)]
    return decisions


def replay(history: History, run: int, policy: Policy | None, decide: Decide[State], initial: State) -> list[Decision]:
    """The decisions of one recorded run; ``policy`` is ``None`` for the one that it ran under.

    Raises:
        StoreError: the store cannot be read or has no such run.
    """
    return replay_facts(history.facts(run), policy or history.policy(run), decide, initial)
