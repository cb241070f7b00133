"""What a planned restart costs: stop, start and canary, from our own launches, cold starts apart from warm ones.

A start is from the spawn to the first answered request, a stop from the decision to the end of the tree. A stop after a
failure says nothing of a planned one and does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from supervisord_vllm.core.pressure import restart_cost_s

KEPT = 21
"""Of each kind, the last: a median that follows an upgrade within a dozen launches."""


@dataclass(frozen=True)
class Restarts:
    """Seconds of our own starts (warm and cold) and stops, the oldest first."""

    warm: tuple[float, ...] = ()
    cold: tuple[float, ...] = ()
    stops: tuple[float, ...] = ()

    def started(self, seconds: float, *, cold: bool) -> Restarts:
        """With one more start."""
        if cold:
            return Restarts(self.warm, (*self.cold, seconds)[-KEPT:], self.stops)
        return Restarts((*self.warm, seconds)[-KEPT:], self.cold, self.stops)

    def stopped(self, seconds: float) -> Restarts:
        """With one more stop."""
        return Restarts(self.warm, self.cold, (*self.stops, seconds)[-KEPT:])

    def cost_s(self, first_guess_s: float, *, cold: bool) -> float:
        """C. Where no start of that kind is known, the other kind's is better than a guess, but a cold one takes at
        least the guess."""
        stop = median(self.stops) if self.stops else 0.0
        own = self.cold if cold else self.warm
        if own:
            return restart_cost_s((start + stop for start in own), first_guess_s)
        other = restart_cost_s((start + stop for start in (*self.warm, *self.cold)), first_guess_s)
        return max(other, first_guess_s) if cold else other

    def to_json(self) -> dict[str, list[float]]:
        """For the store."""
        return {"warm": list(self.warm), "cold": list(self.cold), "stops": list(self.stops)}

    @classmethod
    def from_json(cls, data: Any) -> Restarts:  # noqa: ANN401 - whatever the store holds
        """What `to_json` wrote; what cannot be read is forgotten."""

        def seconds(key: str) -> tuple[float, ...]:
            found = data.get(key) if isinstance(data, dict) else None
            kept = found if isinstance(found, list) else []
            return tuple(float(s) for s in kept if type(s) in (int, float) and 0 < s < 1e6)[-KEPT:]

        return cls(seconds("warm"), seconds("cold"), seconds("stops"))
