"""The transition table is total, and says the truth about where a fact leads."""

from __future__ import annotations

import pytest

from supervisord_vllm.core import facts
from supervisord_vllm.core.facts import FACTS, Commanded, Exited, Fact, Tick
from supervisord_vllm.core.machine import IGNORE, TABLE, Cell, decide
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import Launch, State, StateName


def test_every_state_and_fact_is_a_cell_or_an_explicit_ignore() -> None:
    assert set(TABLE) == set(StateName)
    for name, row in TABLE.items():
        assert set(row) == set(FACTS), name
        assert all(entry is IGNORE or isinstance(entry, Cell) for entry in row.values())


def test_every_fact_class_of_the_module_is_listed() -> None:
    declared = {
        value
        for value in vars(facts).values()
        if isinstance(value, type) and issubclass(value, Fact) and value is not Fact
    }
    assert declared == set(FACTS)


def test_every_state_can_be_reached_and_left() -> None:
    reached = {StateName.ADOPTING}
    for row in TABLE.values():
        for entry in row.values():
            if isinstance(entry, Cell):
                reached |= entry.to
    assert reached == set(StateName)
    for name, row in TABLE.items():
        assert any(isinstance(entry, Cell) and entry.to - {name} for entry in row.values()), name


@pytest.mark.parametrize("name", list(StateName))
def test_a_fact_of_another_launch_is_dropped_and_counted(name: StateName) -> None:
    state = State(name=name, launch=Launch(7, State().target, State().target, 0))
    after, actions = decide(Policy("p"), state, Exited(at_ns=5, launch=6, code=1))
    assert actions == ()
    assert after.name is name
    assert after.dropped == 1


@pytest.mark.parametrize("name", list(StateName))
def test_hold_and_resume_work_in_every_state_and_move_nothing(name: StateName) -> None:
    state = State(name=name)
    held, actions = decide(Policy("p"), state, Commanded(at_ns=1, verb="hold"))
    assert (held.held, held.name, actions) == (True, name, ())
    resumed, actions = decide(Policy("p"), held, Commanded(at_ns=2, verb="resume"))
    assert resumed == state
    assert actions == ()


def test_a_handler_that_leaves_the_table_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dict(TABLE[StateName.STOPPED])
    row[Tick] = Cell(lambda policy, state, fact: (State(name=StateName.SERVING), ()))
    monkeypatch.setitem(TABLE, StateName.STOPPED, row)
    with pytest.raises(AssertionError, match="stopped --Tick--> serving is not in the table"):
        decide(Policy("p"), State(name=StateName.STOPPED), Tick(at_ns=1))
