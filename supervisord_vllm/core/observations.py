"""Observations: what is known of whole lever vectors, and which vectors that forbids.

Feasibility is joint and two-sided. A vector that ran out of memory (``failed-high``) forbids every vector that demands
at least as much on all levers. One whose KV cache was too small (``failed-low``) forbids every vector with the same
utilization or less and at least as much other demand. A cold one (the first compile charges its own peak) forbids only
itself, and what is proven clears only itself. Causes outside the configuration (a neighbour, a race, hardware, the
hub, a port) write none. Observations age: after `LIFETIME_S` they say nothing any more.

"Demands at least as much": a number that is not smaller, graphs rather than eager, and of weights or KV dtypes one that
stands no later in the order of the policy (what is declared first, then the alternatives). A lever that only one of two
vectors names makes them incomparable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.levers import (
    BATCHED_TOKENS,
    EAGER,
    KV_DTYPE,
    MODEL_LEN,
    NUM_SEQS,
    UTILIZATION,
    Levers,
    LeverValue,
)

Outcome = Literal["proven", "failed-high", "failed-low"]

LIFETIME_S = 7 * 24 * 3600
KEPT = 256
"""Observations kept at most; the newest stay."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One lever vector (vLLM's own choices made explicit as far as known) and what came of it.

    ``wall_s`` is wall time in seconds, since it must outlive a boot. ``setting`` names the card and the vLLM version
    that it was seen under, as far as they were known.
    """

    levers: Levers
    outcome: Outcome
    kind: Kind = Kind.NONE
    wall_s: int = 0
    cold: bool = False
    setting: str = ""
    free: int | None = None
    """Memory that was free for the launch, in bytes: where more is free now, running out of it then says nothing."""

    @property
    def utilization(self) -> int | None:
        """The utilization of the vector, per mille."""
        return self.levers.number(UTILIZATION)


_CAPTURE = "max_cudagraph_capture_size"
_POOL_AND_LATER = frozenset({UTILIZATION, MODEL_LEN, KV_DTYPE, EAGER, _CAPTURE})
WITHOUT_EFFECT: Mapping[Kind, frozenset[str]] = {
    Kind.OOM_WEIGHTS: _POOL_AND_LATER | {NUM_SEQS, BATCHED_TOKENS},
    Kind.OOM_PROFILE: _POOL_AND_LATER,
    Kind.KV_NO_BLOCKS: frozenset({MODEL_LEN, KV_DTYPE}),
    **dict.fromkeys(
        (
            Kind.OOM_CUDAGRAPH,
            Kind.OOM_KV_ALLOC,
            Kind.OOM_SAMPLER_WARMUP,
            Kind.OOM_RUNTIME,
            Kind.OOM_MM,
            Kind.OOM_LORA,
        ),
        frozenset({MODEL_LEN, KV_DTYPE}),
    ),
}
"""Levers that do not enter what failed, so that less of them helps nothing: weights are loaded before the pool is made,
and in V1 neither the length nor the KV dtype changes the pool's size."""
MORE_FREE = 256 << 20
"""So much more free memory is another situation."""

Ranks = Mapping[str, tuple[LeverValue, ...]]
"""Levers whose values are names, with their values in the order of the policy, the most demanding first."""


@dataclass(frozen=True)
class Known:
    """Observations that hold now, with the order of named values. `against` is the only question."""

    entries: tuple[Observation, ...] = ()
    ranks: Ranks = field(default_factory=dict)

    def against(self, levers: Levers) -> Observation | None:
        """The newest observation that forbids a vector, or ``None``."""
        for entry in reversed(self.entries):
            if entry.outcome == "proven":
                if entry.levers == levers:
                    return None
            elif self._forbids(entry, levers):
                return entry
        return None

    def proven(self, levers: Levers) -> bool:
        """Whether this very vector is proven, and nothing newer says otherwise."""
        return any(entry.outcome == "proven" and entry.levers == levers for entry in self.entries)

    def _forbids(self, entry: Observation, levers: Levers) -> bool:
        if entry.outcome == "failed-high":
            return self.demands(levers, entry.levers, WITHOUT_EFFECT.get(entry.kind, frozenset()))
        if entry.cold:
            return levers == entry.levers
        mine, theirs = levers.number(UTILIZATION), entry.utilization
        if mine is None or theirs is None or mine > theirs:
            return levers == entry.levers
        return self.demands(levers, entry.levers, WITHOUT_EFFECT.get(entry.kind, frozenset()) | {UTILIZATION})

    def demands(self, levers: Levers, other: Levers, but: frozenset[str] = frozenset()) -> bool:
        """Whether ``levers`` asks for at least as much as ``other`` on every lever (``but`` some)."""
        names = {*levers, *other} - but
        return all(self._at_least(name, levers.get(name), other.get(name)) for name in names)

    def _at_least(self, name: str, value: LeverValue | None, other: LeverValue | None) -> bool:
        if name == EAGER:
            return not value or bool(other)
        if name == KV_DTYPE:
            value, other = value or "auto", other or "auto"
        if value == other:
            return True
        if value is None or other is None:
            return False
        if isinstance(value, int) and isinstance(other, int):
            return value >= other
        order = self.ranks.get(name, ())
        return value in order and other in order and order.index(value) <= order.index(other)


def noted(entries: Iterable[Observation], new: Observation) -> tuple[Observation, ...]:
    """The entries with a new one at the end: what is too old, and what it replaces, is dropped."""
    kept = [
        entry
        for entry in entries
        if new.wall_s - entry.wall_s <= LIFETIME_S
        and not (entry.levers == new.levers and entry.setting in ("", new.setting))
    ]
    return (*kept, new)[-KEPT:]


def holding(entries: Iterable[Observation], ranks: Ranks, wall_s: int, setting: str, free: int | None = None) -> Known:
    """What holds now: neither too old, nor of another card or version, nor out of memory where much less was free. An
    unknown setting fits every other."""
    return Known(
        tuple(
            entry
            for entry in entries
            if wall_s - entry.wall_s <= LIFETIME_S
            and (not setting or entry.setting in ("", setting))
            and not (entry.outcome == "failed-high" and _more_free(free, entry.free))
        ),
        ranks,
    )


def _more_free(now: int | None, then: int | None) -> bool:
    return now is not None and then is not None and now > then + MORE_FREE


def forgiven(entries: Iterable[Observation]) -> tuple[Observation, ...]:
    """Only what is proven: an operator's ``reset`` forgets every failure."""
    return tuple(entry for entry in entries if entry.outcome == "proven")
