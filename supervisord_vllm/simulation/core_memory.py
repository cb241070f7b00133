"""What one EngineCore has of the shared card, and torch's message when it cannot have more."""

from __future__ import annotations

import os

from supervisord_vllm.simulation import texts
from supervisord_vllm.simulation.card import Device, Model
from supervisord_vllm.simulation.ledger import RESERVED_SLACK
from supervisord_vllm.simulation.quantity import MIB
from supervisord_vllm.simulation.shared_card import CardFullError, SharedCard

TITLE = "VLLM::EngineCore"
LEFT_BY_OOM = round(41.56 * MIB)
"""Free memory when an ``oom`` fault strikes (capture 08)."""


class CoreMemory:
    """This process's share of a card. ``graphs`` is what its captured graphs take, for torch's message."""

    def __init__(self, shared: SharedCard, device: Device, model: Model) -> None:
        self.shared = shared
        self.device = device
        self.model = model
        self.graphs = 0

    def take(self, size: int) -> None:
        """Allocate more; raises `CardFullError`."""
        self.shared.grow(size, TITLE)

    def hold(self, size: int) -> int:
        """Set the whole share; returns what is free afterwards. Raises `CardFullError`."""
        return self.shared.hold(size, TITLE)

    def own(self) -> int:
        """Bytes that this process has."""
        return sum(holder.bytes for holder in self.shared.holders() if holder.pid == os.getpid())

    def foreign(self) -> int:
        """Bytes that all others have."""
        return sum(holder.bytes for holder in self.shared.holders() if holder.pid != os.getpid())

    def starve(self, tried: int) -> CardFullError:
        """Take the rest of the card but a few MiB: what happens when ``tried`` bytes are asked then."""
        return CardFullError(tried, self.shared.fill(min(LEFT_BY_OOM, tried // 2), TITLE))

    def message(self, full: CardFullError) -> str:
        """Torch's message with the card's numbers of now."""
        pid, holders = os.getpid(), self.shared.holders()
        return texts.out_of_memory(
            tried=full.tried,
            total=self.device.usable,
            free=full.free,
            pid=pid,
            own=sum(holder.bytes for holder in holders if holder.pid == pid),
            others=[holder for holder in holders if holder.pid != pid],
            outside=self.device.context + self.model.non_torch,
            slack=RESERVED_SLACK,
            pools=self.graphs,
        )
