"""A failed launch as the choice of a remedy sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisord_vllm.core.diagnosis import Diagnosis, Kind
from supervisord_vllm.core.facts import ProcessRef
from supervisord_vllm.core.ledger import Ledger, Room
from supervisord_vllm.core.levers import LEVERS, UTILIZATION, WEIGHTS, Levers, LeverValue
from supervisord_vllm.core.observations import Known

COLD_PEAK = 128 << 20
"""A first compile charges about 63 MiB to the activation (H200); twice that covers what printing hides."""
RACES = 2
"""How often a failure of a proven vector is put down to a race."""


@dataclass(frozen=True)
class Case:
    """One failure with everything that the choice may look at.

    ``levers`` is what the launch ran with, ``target`` what was asked for before a neighbour lowered it. ``room`` is the
    tightest device once the engine was gone, ``grown`` what processes that are not ours took since the gate (bytes),
    ``repeated`` counts this signature since the last proof, this one included. ``known`` is
    what was observed of other vectors. ``barred`` levers were refused by vLLM, ``during_start`` says that it never
    became healthy.
    """

    diagnosis: Diagnosis
    launch: int
    levers: Levers
    target: Levers
    ledger: Ledger = field(default_factory=lambda: Ledger({}))
    room: Room | None = None
    grown: int = 0
    holder: ProcessRef | None = None
    host_memory: bool = False
    repeated: int = 1
    known: Known = field(default_factory=Known)
    barred: frozenset[str] = frozenset()
    during_start: bool = False
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def numbers(self) -> Ledger:
        """The launch's ledger with the failure's own numbers over it."""
        return self.ledger.merged(self.diagnosis.numbers)

    @property
    def served_before(self) -> bool:
        """Whether these weights were proven once: then they lie in a cache."""
        weights = self.levers.get(WEIGHTS)
        return any(seen.outcome == "proven" and seen.levers.get(WEIGHTS) == weights for seen in self.known.entries)

    @property
    def warms(self) -> bool:
        """Whether the KV cache lacks no more than a first compile takes for itself: the next start is warm."""
        if self.diagnosis.kind not in (Kind.KV_NO_BLOCKS, Kind.KV_LEN_TOO_LONG) or self.repeated > 1:
            return False
        needed, there = self.numbers.size("needed_kv_gib") or 0, self.numbers.size("available_kv_gib")
        cold = bool(self.numbers.numbers.get("compile_cold_s"))
        return cold and there is not None and needed - there <= COLD_PEAK

    @property
    def races(self) -> bool:
        """Whether a KV cache that found no room is the doing of something that moved during the profile run: the
        same vector is proven, so it is tried again, at most twice."""
        return (
            self.diagnosis.kind is Kind.KV_NO_BLOCKS
            and self.repeated <= RACES
            and (bool(self.grown) or self.known.proven(self.levers))
        )

    @property
    def total(self) -> int | None:
        """T in bytes: what vLLM printed, else what was sampled."""
        sampled = self.room.total if self.room else None
        # A CPU engine prints the machine; its allocator's messages may name a card that does not exist.
        return sampled if self.host_memory and sampled else self.numbers.size("total_gib") or sampled

    def value(self, lever: str) -> LeverValue | None:
        """The lever's value in this launch: what was passed, else what the log says that vLLM chose."""
        if lever in self.levers:
            return self.levers[lever]
        if lever == UTILIZATION:
            printed = self.numbers.numbers.get("util")
            return round(printed * 1000) if isinstance(printed, (int, float)) else None
        return self.numbers.count(lever) if LEVERS[lever].kind == "int" else None
