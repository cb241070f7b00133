"""The soak's memory: samples of each device gathered into a few numbers, and what they say about the configuration.

A launch takes more than it asked for if it holds more than what it requested (R), the CUDA graphs that vLLM does not
count, its context and half a GiB. That alone is only said: on an H200 an engine of 256 sequences at 0.135 held 2.96 GiB
more than R from its start on, while 118 GiB were free, and no lower utilization makes that less. A launch *fails* where
at the end less is free than it took during the soak, and at least 150 MiB. The slope over so short a time proves no
leak: it is recorded, not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from supervisord_vllm.core.facts import DeviceMemory, DeviceSoak
from supervisord_vllm.core.ledger import MARGIN, gib, requested

BEYOND = 512 << 20
"""What an engine may hold beyond R, graphs and context: the allocator's rounding, workspaces of libraries."""
HOUR_NS = 3600 * 10**9
SIGNATURE = "soak-memory"


@dataclass(frozen=True, slots=True)
class _Course:
    """One device: first and last sample, the most, and the sums of a least-squares line through its own use."""

    first: DeviceMemory
    last: DeviceMemory
    most: int
    began_ns: int
    count: int = 0
    time: float = 0.0
    own: float = 0.0
    time_time: float = 0.0
    time_own: float = 0.0

    def then(self, at_ns: int, seen: DeviceMemory) -> _Course:
        hours, own = (at_ns - self.began_ns) / HOUR_NS, float(seen.own_bytes)
        return replace(
            self,
            last=seen,
            most=max(self.most, seen.own_bytes),
            count=self.count + 1,
            time=self.time + hours,
            own=self.own + own,
            time_time=self.time_time + hours * hours,
            time_own=self.time_own + hours * own,
        )

    @property
    def slope(self) -> float | None:
        spread = self.count * self.time_time - self.time * self.time
        if self.count < 3 or spread <= 0 or not self.last.own_bytes:
            return None
        return round((self.count * self.time_own - self.time * self.own) / spread)


@dataclass(frozen=True)
class Soaking:
    """The samples of one soak, in constant space."""

    courses: Mapping[str, _Course] = field(default_factory=dict)

    def sampled(self, at_ns: int, devices: tuple[DeviceMemory, ...]) -> Soaking:
        """With one more sample."""
        courses = dict(self.courses)
        for seen in devices:
            course = courses.get(seen.device) or _Course(seen, seen, seen.own_bytes, at_ns)
            courses[seen.device] = course.then(at_ns, seen)
        return Soaking(courses)

    @property
    def devices(self) -> tuple[DeviceSoak, ...]:
        """What was seen so far, by device."""
        return tuple(
            DeviceSoak(
                device=name,
                total_bytes=course.last.total_bytes,
                context_bytes=course.last.context_bytes,
                own_first_bytes=course.first.own_bytes,
                own_most_bytes=course.most,
                own_last_bytes=course.last.own_bytes,
                free_first_bytes=course.first.free_bytes,
                free_last_bytes=course.last.free_bytes,
                samples=course.count,
                slope_bytes_per_hour=course.slope,
            )
            for name, course in sorted(self.courses.items())
        )


@dataclass(frozen=True, slots=True)
class Excess:
    """What a launch takes too much of: ``missing_bytes`` are needed and ``free_bytes`` are there, on a device of
    ``total_bytes``. ``fails``: it cannot stay so."""

    text: str
    missing_bytes: int
    free_bytes: int
    total_bytes: int
    fails: bool = True


def excess(
    devices: tuple[DeviceSoak, ...], utilization: int | None, graphs: int, contexts: Mapping[str, int]
) -> Excess | None:
    """What is wrong with the memory of a soak, on the device where most is missing; ``None``: nothing.

    ``utilization`` in per mille, ``None`` where it is not known or does not bound the engine: then its use is not
    judged. ``graphs`` are uncounted CUDA graphs, ``contexts`` learnt contexts of devices, in bytes.
    """
    found = [one for seen in devices for one in _excesses(seen, utilization, graphs, contexts.get(seen.device, 0))]
    return max(found, key=lambda one: (one.fails, one.missing_bytes - one.free_bytes), default=None)


def _excesses(seen: DeviceSoak, utilization: int | None, graphs: int, learnt: int) -> list[Excess]:
    found = []
    wanted = max(MARGIN, seen.growth_bytes)
    short = seen.free_last_bytes < wanted
    if utilization is not None and seen.own_most_bytes:
        context = max(seen.context_bytes, learnt)
        share = requested(utilization, seen.total_bytes)
        allowed = share + graphs + context + BEYOND
        if seen.own_most_bytes > allowed:
            text = (
                f"it holds {gib(seen.own_most_bytes)} of {seen.device}, more than the {gib(share)} that it requested,"
                f" {gib(graphs)} of graphs, {gib(context)} of context and {gib(BEYOND)} together"
            )
            found.append(Excess(text, seen.own_most_bytes - allowed, 0, seen.total_bytes, fails=short))
    if short:
        text = (
            f"{gib(seen.free_last_bytes)} are left of {seen.device}, and it took {gib(seen.growth_bytes)} during the"
            f" soak; {gib(wanted)} should be"
        )
        found.append(Excess(text, seen.growth_bytes, seen.free_last_bytes, seen.total_bytes))
    return found
