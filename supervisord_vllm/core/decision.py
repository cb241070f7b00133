"""Decisions: what `decide` chose, with its cause, arithmetic and next step as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from supervisord_vllm.core.diagnosis import Action, Direction, Evidence, Kind
from supervisord_vllm.core.levers import LeverValue

How = Literal["computed", "stepped", "restored"]


@dataclass(frozen=True, slots=True)
class Move:
    """One lever from an old to a new value; ``None`` is vLLM's own default."""

    lever: str
    before: LeverValue | None
    after: LeverValue
    direction: Direction
    how: How


@dataclass(frozen=True)
class Decision:
    """One choice. ``number`` counts for ever, ``launch`` is the launch that it judges; ``moves`` are made together.

    ``arithmetic`` shows the computation, ``skipped`` why other remedies were passed over, ``sentence`` is what a person
    reads at 3 a.m. ``acted`` is false under ``act = false``: only said, not done.
    """

    number: int
    at_ns: int
    launch: int
    kind: Kind
    action: Action
    sentence: str
    moves: tuple[Move, ...] = ()
    target: str | None = None
    evidence: tuple[Evidence, ...] = ()
    arithmetic: str = ""
    skipped: tuple[str, ...] = ()
    acted: bool = True
    then: str = ""
    """The state that it leads to, as a public name."""
    then_ns: int = 0
    """The delay before that."""
