"""The memory of a simulated card, as NVML would tell it about a real one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from supervisord_vllm.simulation.card import CardError
from supervisord_vllm.simulation.shared_card import Holder, SharedCard

__all__ = ["CardError", "CardMemory", "Holder", "read_memory"]


@dataclass(frozen=True, slots=True)
class CardMemory:
    """One sample, in bytes. ``total`` is NVML's total, ``reserved`` the driver's part of it; an engine sees total -
    reserved (`usable`). ``free`` is before a new engine's own ``context`` is taken off. Holders are living processes,
    the largest first."""

    name: str
    uuid: str
    total: int
    reserved: int
    free: int
    context: int
    holders: tuple[Holder, ...]

    @property
    def usable(self) -> int:
        """What vLLM prints as the device's total."""
        return self.total - self.reserved


def read_memory(state: str | Path) -> CardMemory:
    """Sample the card whose state file is ``state``; it never writes and takes no lock.

    Raises:
        CardError: there is no such card, or its file is damaged.
    """
    shared = SharedCard(state)
    device = shared.card().device
    holders = shared.holders()
    return CardMemory(
        name=device.name,
        uuid=device.uuid,
        total=device.total,
        reserved=device.reserved,
        free=device.usable - sum(holder.bytes for holder in holders),
        context=device.context,
        holders=holders,
    )
