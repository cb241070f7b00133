"""The last fifteen minutes as sparklines: the daemon's series (`supervisord_vllm.series`) in columns of a screen.

Pure. A view outlives a daemon: `joined` keeps what an earlier one had told. Anything that is no series reads as empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from supervisord_vllm.cli.drawing import Pen, spark
from supervisord_vllm.cli.paper import listed, number, table
from supervisord_vllm.clock import parse_rfc3339

SPAN_S = 900.0
REACH = 2.0
"""A point stands for so many pauses between two pages before it; where a page is missing longer is a gap."""
MOST_POINTS = 2000


@dataclass(frozen=True)
class Timeline:
    """Points in wall time (seconds since 1970), the oldest first; columns by name, ``None`` where unknown."""

    at: tuple[float, ...] = ()
    columns: Mapping[str, tuple[float | None, ...]] | None = None
    launches: tuple[tuple[float, int], ...] = ()
    every_s: float = 5.0

    def column(self, name: str) -> tuple[float | None, ...]:
        """One column, as long as ``at``."""
        return (self.columns or {}).get(name) or (None,) * len(self.at)

    def latest(self, name: str, now: float) -> float | None:
        """The newest value, if it is of now."""
        fresh = self.at and self.at[-1] >= now - REACH * self.every_s - 2
        return self.column(name)[-1] if fresh else None

    def known(self, name: str, now: float) -> list[float]:
        """All known values of the span."""
        pairs = zip(self.at, self.column(name), strict=True)
        return [value for at, value in pairs if value is not None and at > now - SPAN_S]


def timeline(document: object) -> Timeline:
    """Read ``GET /series``; whatever is not understood is left out."""
    if not isinstance(document, dict):
        return Timeline()
    points = document.get("points")
    try:
        now = parse_rfc3339(str(document.get("now")))
    except (ValueError, OverflowError):
        return Timeline()
    if not isinstance(points, dict) or not isinstance(points.get("age_s"), list):
        return Timeline()
    ages = [number(age) for age in points["age_s"]][-MOST_POINTS:]
    kept = [place for place, age in enumerate(ages) if age is not None]
    columns = {
        name: tuple(number(cells[place]) for place in kept)
        for name, values in points.items()
        if isinstance(values, list) and len(cells := values[-MOST_POINTS:]) == len(ages)
    }
    begun = document.get("launches")
    launches = [(number(one.get("age_s")), number(one.get("number"))) for one in map(table, listed(begun))]
    every = number(document.get("every_s"))
    return Timeline(
        at=tuple(now - (ages[place] or 0.0) for place in kept),
        columns=columns,
        launches=tuple((now - age, int(which)) for age, which in launches if age is not None and which is not None),
        every_s=every if every is not None and every > 0 else 5.0,
    )


def joined(earlier: Timeline, later: Timeline, now: float) -> Timeline:
    """What two daemons told, one after the other: the later one's word counts from its first point on. What is older
    than the span is forgotten."""
    oldest, until = now - SPAN_S, later.at[0] - 1 if later.at else math.inf
    kept = [place for place, at in enumerate(earlier.at) if oldest < at < until]
    names = {*(earlier.columns or {}), *(later.columns or {})}
    columns = {name: (earlier.column(name), later.column(name)) for name in names}
    numbers = {number for _, number in later.launches}
    begun = (one for one in earlier.launches if one[0] > oldest and one[1] not in numbers)
    return Timeline(
        at=tuple(earlier.at[place] for place in kept) + later.at,
        columns={name: tuple(old[place] for place in kept) + new for name, (old, new) in columns.items()},
        launches=(*begun, *later.launches),
        every_s=later.every_s,
    )


@dataclass(frozen=True)
class Row:
    """How a column is drawn: what several points of one cell come to, and what the highest character means.

    ``summed``: the number beside it is the sum of the span, not the newest value.
    """

    label: str
    column: str
    show: Callable[[float], str]
    merge: Callable[[Sequence[float]], float] = max
    top: float | None = None
    summed: bool = False


def count(value: float) -> str:
    """``1,468``."""
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    """A latency: ``850 ms``, ``7.8 s``, ``33 s``."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def share(value: float) -> str:
    """``25%``."""
    return f"{value:.0%}"


ROWS = (
    Row("running", "running", count),
    Row("waiting", "waiting", count),
    Row("KV cache", "kv_usage", share, top=1.0),
    Row("TTFT p95", "ttft_p95_s", seconds),
    Row("inter-token", "inter_token_p95_s", seconds),
    Row("preemptions", "preemptions", count, summed=True),
    Row("tokens/s", "tokens_per_s", count, merge=fmean),
)
"""The first are the last to go where a screen is low."""


def drawn(line: Timeline, row: Row, width: int, now: float, pen: Pen) -> str:
    """One sparkline of ``width`` cells that ends now.

    A cell's time is fixed, so that the picture moves by whole cells. It holds the points that fall into it; a cell
    between two points shows the later one, which speaks for the time since the one before.
    """
    if width <= 0:
        return ""
    step = SPAN_S / width
    begin = math.ceil(now / step) * step - SPAN_S
    cells: list[list[float]] = [[] for _ in range(width)]
    reach = REACH * line.every_s
    previous = -math.inf
    for at, value in zip(line.at, line.column(row.column), strict=True):
        place = math.floor((at - begin) / step)
        if value is not None and 0 <= place < width:
            cells[place].append(value)
            first = math.floor((max(previous, at - reach) - begin) / step) + 1
            for empty in range(max(0, first), place):
                if not cells[empty]:
                    cells[empty].append(value)
        previous = at
    values = [row.merge(cell) if cell else None for cell in cells]
    begun = (math.floor((at - begin) / step) for at, _ in line.launches)
    return spark(values, frozenset(place for place in begun if 0 <= place < width), row.top, pen)
