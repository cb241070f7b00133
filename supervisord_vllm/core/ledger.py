"""vLLM's memory account of a launch, and the arithmetic that turns its numbers into the next utilization.

    T  total as vLLM sees it            u  gpu_memory_utilization, per mille
    F  free as vLLM will see it         R = ceil(u * T)     what the engine may use of the whole card
    N  everything of the engine that is not KV cache        KV = R - N, so KV(u) = KV0 + T * (u - u0)

Source: vLLM 0.9.2-0.33 ``v1/worker/gpu_worker.py`` (``request_memory``, ``determine_available_memory``); the account
was checked on an H200: T 139.8 GiB, u 0.9, N 15.67 -> KV 110.15 GiB. Printed GiB have two decimals: ±0.005 GiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisord_vllm.core.diagnosis import Number

if TYPE_CHECKING:  # `diagnose` computes with ledgers and needs no facts: 45 ms of its start
    from supervisord_vllm.core.facts import DeviceMemory

MIB = 1 << 20
GIB = 1 << 30
MARGIN = 150 * MIB
"""Kept free beyond the request; vLLM subtracts the same redundancy in its own suggestion (``gpu_worker.py``)."""
PRINTED = GIB // 100
"""What two printed numbers of two decimals may hide together."""
BLOCK = 16
"""Tokens of one KV cache block on a GPU: lengths are rounded down to it."""


def to_bytes(gib: float) -> int:
    """GiB as printed → bytes."""
    return round(gib * GIB)


def gib(value: int) -> str:
    """Bytes as a sentence shows them: ``40.50 GiB``, below one GiB ``110 MiB``."""
    return f"{value / GIB:.2f} GiB" if abs(value) >= GIB else f"{value / MIB:.0f} MiB"


def requested(utilization: int, total: int) -> int:
    """R in bytes for a utilization in per mille."""
    return -(-utilization * total // 1000)


def fitting(free: int, total: int) -> int:
    """The largest utilization (per mille) whose request and margin fit into ``free`` bytes; 0 where none does."""
    return max(0, 1000 * (free - MARGIN) // total)


def per_mille_up(amount: int, total: int) -> int:
    """The smallest change of utilization (per mille) that is worth at least ``amount`` bytes."""
    return max(0, -(-1000 * amount // total))


@dataclass(frozen=True, slots=True)
class Room:
    """T and F of the device with the least room, in bytes; F is after the engine's own context."""

    device: str
    total: int
    free: int

    @property
    def name(self) -> str:
        """The device in a sentence: the first block of a UUID names a card well enough."""
        return self.device[:12] if self.device.startswith(("GPU-", "MIG-")) else self.device

    def less(self, amount: int) -> Room:
        """The same device with so much less free: for what a launch takes beyond its request."""
        return Room(self.device, self.total, self.free - amount)

    @property
    def fits(self) -> int:
        """The largest utilization that fits, per mille."""
        return fitting(self.free, self.total)

    def short_of(self, utilization: int) -> int:
        """Bytes missing for this utilization and the margin; 0 or less when it fits."""
        return requested(utilization, self.total) + MARGIN - self.free


GRAPHS_MOST = 2 * GIB
"""vLLM prints the size of its graphs as a difference of the whole card's free memory, so a neighbour that allocates
meanwhile is counted; more than this is never believed."""


def uncounted_graphs(numbers: Mapping[str, Number]) -> int:
    """Bytes of CUDA graphs that come on top of what was requested; 0 where they are counted or were not printed."""
    value = numbers.get("graphs_gib")
    if numbers.get("graphs_counted") or not isinstance(value, (int, float)) or value <= 0:
        return 0
    return min(to_bytes(value), GRAPHS_MOST)


def room(samples: Iterable[tuple[DeviceMemory, ...]], context: Mapping[str, int]) -> Room | None:
    """The tightest device over several samples: for each device the least free memory, then the least fitting one.

    ``context`` overrides the first guess of a device's context (bytes) where a launch has taught a better one.
    """
    least: dict[str, Room] = {}
    for devices in samples:
        for device in devices:
            free = device.free_bytes - max(device.context_bytes, context.get(device.device, 0))
            seen = least.get(device.device)
            if seen is None or free < seen.free:
                least[device.device] = Room(device.device, device.total_bytes, free)
    return min(least.values(), key=lambda r: (r.fits, r.device), default=None)


_LEAST = frozenset({"available_kv_gib", "kv_tokens", "free_gib", "total_gib"})
_MOST = frozenset({"weights_gib", "activation_gib", "non_torch_gib", "requested_gib"})


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a launch printed of its account, by canonical name; sizes in GiB. Later numbers replace earlier ones."""

    numbers: Mapping[str, Number]

    def size(self, name: str) -> int | None:
        """A printed size in bytes; ``None`` where it was not printed, and for a printed 0.0, which says nothing."""
        value = self.numbers.get(name)
        return to_bytes(value) if isinstance(value, (int, float)) and value != 0 else None

    def count(self, name: str) -> int | None:
        """A printed whole number (tokens, requests), or ``None``."""
        value = self.numbers.get(name)
        return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    @property
    def bytes_per_token(self) -> float | None:
        """KV cache bytes of one token, from the KV cache's size in bytes and in tokens."""
        pool, tokens = self.size("available_kv_gib"), self.count("kv_tokens")
        return pool / tokens if pool is not None and pool > 0 and tokens else None

    def tightened(self, numbers: Mapping[str, Number]) -> Ledger:
        """A ledger that knows these numbers too; of several ranks the tightest counts: the least KV cache, and the most
        of what it competes with."""
        kept = {**self.numbers, **numbers}
        for names, pick in ((_LEAST, min), (_MOST, max)):
            for name in names & numbers.keys() & self.numbers.keys():
                mine, new = self.numbers[name], numbers[name]
                if isinstance(mine, (int, float)) and isinstance(new, (int, float)):
                    kept[name] = pick(mine, new)
        return Ledger(kept)

    def merged(self, numbers: Mapping[str, Number]) -> Ledger:
        """A ledger that knows these numbers too."""
        return Ledger({**self.numbers, **numbers})
