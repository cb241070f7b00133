"""Memory of a simulated card, which the stand-in engine's processes and the daemon share through a file.

Contract: as every `memory.MemorySource`. The model itself is `supervisord_vllm.simulation`; it is imported when a
card is opened, so that a production daemon never loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from supervisord_vllm.core.facts import DeviceMemory, ProcessRef
from supervisord_vllm.host.memory import MemoryUnavailable


class CardMemory:
    """The card whose state file is ``state``. It is made, as the first engine would make it, from what the engine's
    environment says (``SIMULATED_CARD_TOML``), so that a gate can look at it before the first launch."""

    def __init__(self, state: Path, environ: Mapping[str, str]) -> None:
        from supervisord_vllm.simulation.card import CardError
        from supervisord_vllm.simulation.shared_card import CARD_VARIABLE, TOML_VARIABLE, SharedCard

        self._state = state
        self._error = CardError
        try:
            SharedCard.from_environment({CARD_VARIABLE: str(state), TOML_VARIABLE: environ.get(TOML_VARIABLE, "")})
        except (CardError, OSError) as error:
            raise MemoryUnavailable(f"simulated card: {error}") from error

    @property
    def name(self) -> str:
        """``card:PATH``."""
        return f"card:{self._state}"

    def sample(self, own_pids: frozenset[int]) -> tuple[DeviceMemory, ...]:
        """One look at the card."""
        from supervisord_vllm.simulation.memory import read_memory

        try:
            card = read_memory(self._state)
        except (self._error, OSError) as error:
            raise MemoryUnavailable(f"simulated card: {error}") from error
        holders = tuple(
            ProcessRef(holder.pid, holder.user, holder.command, holder.bytes, holder.pid in own_pids)
            for holder in card.holders
        )
        return (
            DeviceMemory(
                device=card.uuid,
                total_bytes=card.usable,
                free_bytes=card.free,
                context_bytes=card.context,
                own_bytes=sum(holder.memory_bytes or 0 for holder in holders if holder.ours),
                holders=holders,
            ),
        )
