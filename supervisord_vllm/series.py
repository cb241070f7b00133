"""The last fifteen minutes of an engine's load, so that a view that is opened now shows what has been going on.

One point for each page of /metrics, in a bounded ring of the daemon's memory; a new daemon begins with none. What a
page does not say is ``None``, a gap, never zero; what happened since the page before (tokens, preemptions, quantiles)
is unknown on a launch's first page and where a counter was reset. Times are CLOCK_BOOTTIME.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from supervisord_vllm.clock import SECOND_NS, Now
from supervisord_vllm.engine.metrics import EngineLoad, Interval, between

SPAN_S = 900.0
CLOSEST_S = 0.9
"""Of pages that follow each other faster, the points in between are left out."""
MOST_POINTS = int(SPAN_S / CLOSEST_S) + 1
MOST_LAUNCHES = 64
"""Starts of launches that are remembered: an engine that dies at once must not fill the ring."""
SCHEMA = 1

_COLUMNS = ("running", "waiting", "kv_usage", "preemptions")
_SECONDS = ("ttft_p50", "ttft_p95", "inter_token_p50", "inter_token_p95", "queue_p95")


@dataclass(frozen=True, slots=True)
class _Point:
    at_ns: int
    launch: int
    seen: Interval


class Series:
    """The ring. ``every_s`` is the pause between two pages of /metrics, as the policy has it."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._points: deque[_Point] = deque(maxlen=MOST_POINTS)
        self._launches: deque[tuple[int, int]] = deque(maxlen=MOST_LAUNCHES)
        self._last: tuple[int, int, EngineLoad] | None = None

    def launched(self, at_ns: int, number: int) -> None:
        """A launch begins: what is counted begins anew."""
        self._launches.append((at_ns, number))
        self._last = None

    def page(self, at_ns: int, launch: int, load: EngineLoad) -> None:
        """A page of /metrics."""
        before = self._last
        if before is None or before[1] != launch:
            seen = None
        else:
            seconds = (at_ns - before[0]) / SECOND_NS
            if seconds < CLOSEST_S:
                return
            seen = between(before[2], load, seconds)
        if seen is None:  # a baseline: only the gauges are known
            seen = Interval(0.0, running=load.running, waiting=load.waiting, kv_usage=load.kv_usage)
        self._last = (at_ns, launch, load)
        self._points.append(_Point(at_ns, launch, seen))

    def document(self, name: str, now: Now) -> dict[str, Any]:
        """``/series``: one list for each column, the oldest point first; ages are seconds before ``now``."""
        oldest = now.boottime_ns - int(SPAN_S * SECOND_NS)
        points = [point for point in self._points if point.at_ns >= oldest]
        seen = [point.seen for point in points]

        def age(at_ns: int) -> float:
            return round((now.boottime_ns - at_ns) / SECOND_NS, 1)

        return {
            "schema": SCHEMA,
            "name": name,
            "now": now.show(now.boottime_ns),
            "span_s": SPAN_S,
            "every_s": max(self._every_s, CLOSEST_S),
            "launches": [
                {"number": number, "age_s": age(at_ns)} for at_ns, number in self._launches if at_ns >= oldest
            ],
            "points": {
                "age_s": [age(point.at_ns) for point in points],
                "launch": [point.launch for point in points],
                **{column: [_rounded(getattr(one, column)) for one in seen] for column in _COLUMNS},
                "tokens_per_s": [_rounded(one.rate(one.generation_tokens)) for one in seen],
                **{f"{column}_s": [_rounded(getattr(one, column)) for one in seen] for column in _SECONDS},
            },
        }


def _rounded(value: float | None) -> float | None:
    """Four significant digits: a page is hundreds of numbers, and nobody reads more."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")
