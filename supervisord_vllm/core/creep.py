"""Creep: does the memory of a serving engine grow for hours, how fast, and until when is some left?

The rate is the Theil-Sen estimate: the median of the slopes between all pairs of samples, which a quarter of wild
samples does not move. Its bounds are Sen's interval of 95 % from the variance of Kendall's S with ties (P. K. Sen,
Journal of the American Statistical Association 63, 1968, p. 1379). They suppose that what scatters around the line is
independent from sample to sample, so samples lie ten minutes apart; memory that grows in rare large steps is
recognised late, not wrongly.

What is no creep: the first half hour of an answering engine (it fills its pools and workspaces); growth that has ended
(the later half must grow as well); a jump by a twentieth of the card, up or down (something was loaded, or the engine
slept: the series begins anew); a CPU engine below what it requested (it only touches the pages of its pool).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from supervisord_vllm.core.ledger import MARGIN, MIB, gib, requested
from supervisord_vllm.core.policy import SECOND

if TYPE_CHECKING:  # facts carry a `Growth`
    from supervisord_vllm.core.facts import DeviceMemory

HOUR_NS = 3600 * SECOND
EVERY_NS = 600 * SECOND
"""Between two samples that are kept."""
SETTLING_NS = 1800 * SECOND
"""After its first answer an engine still allocates what it will keep."""
KEPT = 144
"""A day of samples."""
LEAST = 18
"""Three hours of them, before anything is said."""
GROWN = 32 * MIB
"""Less than this over the whole series is no creep, however steady."""
JUMP = 20
"""A change by more than 1/JUMP of the card between two samples is no creep."""
ANOTHER = 0.25
"""A rate, or a time until nothing is left, that differs by more than this share is worth a fact."""
HOST = "host-memory"
_Z95 = 1.959964
"""Normal quantile of 97.5 %."""

Point = tuple[int, int]
"""Time (CLOCK_BOOTTIME ns) and bytes."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How the engine's own memory on one device grows: bytes an hour, with 95 % confidence between ``low`` and
    ``high``, seen over ``span_ns`` up to ``at_ns``; what it held then and what was free beside it, in bytes."""

    device: str
    at_ns: int
    per_hour: int
    low: int
    high: int
    span_ns: int
    own_bytes: int
    free_bytes: int
    creeps: bool = True
    """Whether that is a steady growth that matters; else the rate is only what was measured."""

    @property
    def full_ns(self) -> int:
        """When what is free will be used up at this rate, but for the margin that vLLM wants (CLOCK_BOOTTIME)."""
        left = max(0, self.free_bytes - MARGIN)
        return self.at_ns + left * HOUR_NS // max(1, self.per_hour)

    def __str__(self) -> str:
        return f"{gib(self.per_hour)}/h (95 %: {gib(self.low)} to {gib(self.high)})"


def theil_sen(points: Sequence[Point]) -> tuple[float, float, float]:
    """Slope, and the lower and upper bound of 95 %, in bytes per nanosecond. Times rise; two points at least."""
    count = len(points)
    if count < 2:
        raise ValueError("a slope needs two points")
    slopes = sorted(
        (points[j][1] - points[i][1]) / (points[j][0] - points[i][0]) for i in range(count) for j in range(i + 1, count)
    )
    ties: dict[int, int] = {}
    for _, value in points:
        ties[value] = ties.get(value, 0) + 1
    tied = sum(n * (n - 1) * (2 * n + 5) for n in ties.values())
    spread = _Z95 * math.sqrt(max(0, count * (count - 1) * (2 * count + 5) - tied) / 18)
    low = max(0, round((len(slopes) - spread) / 2) - 1)
    return median(slopes), slopes[low], slopes[len(slopes) - 1 - low]


@dataclass(frozen=True)
class CreepWatch:
    """One launch while it answers: a day of samples of each device, and what they say."""

    launch: int = 0
    series: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    growth: Mapping[str, Growth] = field(default_factory=dict)
    """The estimate of each device that was watched for long enough."""

    @property
    def creep(self) -> Growth | None:
        """The device that will be full first, if any creeps."""
        creeping = [growth for growth in self.growth.values() if growth.creeps]
        return min(creeping, key=lambda growth: (growth.full_ns, growth.device), default=None)

    def of(self, launch: int) -> Mapping[str, Growth]:
        """The estimates, if they are that launch's."""
        return self.growth if launch == self.launch else {}

    def sampled(
        self, now_ns: int, launch: int, ready_ns: int, devices: Sequence[DeviceMemory], utilization: int | None
    ) -> CreepWatch:
        """After a sample beside launch ``launch``, which answers since ``ready_ns``. Most samples change nothing."""
        watch = self if launch == self.launch else CreepWatch(launch)
        if now_ns < ready_ns + SETTLING_NS:
            return watch
        series, growth = dict(watch.series), dict(watch.growth)
        for device in devices:
            points = series.get(device.device, ())
            if points and now_ns < points[-1][0] + EVERY_NS:
                continue
            if device.device == HOST and (
                utilization is None or device.own_bytes < requested(utilization, device.total_bytes)
            ):
                continue
            if points and abs(device.own_bytes - points[-1][1]) * JUMP > device.total_bytes:
                points = ()
                if device.device in growth:  # what was said of it no longer holds
                    own, free = device.own_bytes, device.free_bytes
                    growth[device.device] = Growth(device.device, now_ns, 0, 0, 0, 0, own, free, creeps=False)
            series[device.device] = points = (*points, (now_ns, device.own_bytes))[-KEPT:]
            if len(points) >= LEAST:
                growth[device.device] = grown(device.device, points, device.free_bytes)
        return CreepWatch(launch, series, growth)


def grown(device: str, points: Sequence[Point], free_bytes: int) -> Growth:
    """What a series says. Growth that has slowed down is told by its later half."""
    whole, later = theil_sen(points), theil_sen(points[len(points) // 2 :])
    (rate, low, high), seen = (later, points[len(points) // 2 :]) if later[2] < whole[0] else (whole, points)
    span = points[-1][0] - points[0][0]
    steady = whole[1] > 0 and later[1] > 0 and rate * span >= GROWN
    return Growth(
        device=device,
        at_ns=points[-1][0],
        per_hour=round(rate * HOUR_NS),
        low=round(low * HOUR_NS),
        high=round(high * HOUR_NS),
        span_ns=seen[-1][0] - seen[0][0],
        own_bytes=points[-1][1],
        free_bytes=free_bytes,
        creeps=steady,
    )


def creep_matters(told: Growth | None, seen: Growth | None) -> bool:
    """Whether what is seen now is worth a `CreepSeen`: creep begins, ends, or will fill the card at another time."""
    if told is None or seen is None:
        return told is not seen
    if told.device != seen.device or abs(seen.per_hour - told.per_hour) > ANOTHER * told.per_hour:
        return True
    return abs(seen.full_ns - told.full_ns) > ANOTHER * max(HOUR_NS, told.full_ns - told.at_ns)
