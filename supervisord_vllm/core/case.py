"""A failed launch as the choice of a remedy sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisord_vllm.core.diagnosis import Diagnosis
from supervisord_vllm.core.facts import ProcessRef
from supervisord_vllm.core.ledger import Ledger, Room
from supervisord_vllm.core.levers import LEVERS, UTILIZATION, Levers, LeverValue


@dataclass(frozen=True, slots=True)
class Bracket:
    """Utilizations (per mille) that failed within this incident while all other levers stayed as they are."""

    low: int = 0
    high: int = 1001


@dataclass(frozen=True)
class Case:
    """One failure with everything that the choice may look at.

    ``levers`` is what the launch ran with, ``target`` what was asked for before a neighbour lowered it. ``room`` is the
    tightest device once the engine was gone, ``grown`` what processes that are not ours took since the gate (bytes),
    ``repeated`` counts this signature since the last proof, this one included. ``barred`` levers were refused by vLLM.
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
    bracket: Bracket = Bracket()
    barred: frozenset[str] = frozenset()

    @property
    def numbers(self) -> Ledger:
        """The launch's ledger with the failure's own numbers over it."""
        return self.ledger.merged(self.diagnosis.numbers)

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
