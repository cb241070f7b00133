"""Draw docs/pressure.svg: when slowness is worth a restart, by the daemon's rule. ``python scripts/pressure_plot.py``

Two stretches of a real engine (captures 30 and 32: one load of 200 clients on an H200, at utilization 0.135 and 0.30)
are laid one after the other: how late first tokens came is each capture's own histogram, page after page of 5 s. The
rule (`core.watch`) looks at the pages; what the restart takes was measured too (capture 32). Nothing is drawn by hand
but the words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from supervisord_vllm.core.policy import SECOND, Pressure
from supervisord_vllm.core.pressure import Histogram, Sample, binding, late_share, loss
from supervisord_vllm.core.watch import Terms, Watch
from supervisord_vllm.engine.metrics import parse_metrics

ROOT = Path(__file__).resolve().parent.parent
CAPTURES = ROOT / "tests" / "data" / "captures" / "h200-vllm-0.26.0"
TARGET_S = 10.0
COST_S = 46.4
"""Capture 32: 45.9 s from spawn to healthy, 0.5 s from SIGTERM to the exit, 0.04 s for the canary."""
PAGE_S = 5.0
LOAD_S = 60.0
"""When the load comes; before it nobody is late."""
END_S = 600.0


@dataclass(frozen=True)
class Stretch:
    """A capture: its histogram of first tokens over so many seconds of load, and what was seen meanwhile."""

    ttft: Histogram
    seconds: float
    running: int
    waiting: int
    kv_usage: float
    preemptions: int

    def page(self, at_s: float, served_s: float) -> Sample:
        """The page of /metrics after so many seconds of this load."""
        share = served_s / self.seconds
        return Sample(
            at_ns=round(at_s * SECOND),
            running=self.running if share > 0 else 0,
            waiting=self.waiting if share > 0 else 0,
            kv_usage=self.kv_usage,
            preemptions=round(self.preemptions * share),
            ttft=tuple((bound, round(count * share)) for bound, count in self.ttft),
        )


def captured(name: str, seconds: float, running: int, waiting: int, kv_usage: float) -> Stretch:
    """A capture's last page, and the middle of what its gauges showed."""
    load = parse_metrics((CAPTURES / f"{name}.metrics").read_text(encoding="utf-8"))
    return Stretch(load.ttft, seconds, running, waiting, kv_usage, load.preemptions_total or 0)


@dataclass(frozen=True)
class Story:
    """What the rule made of it: (time, S) and (time, loss) of every page, when it acted, the loss before and after."""

    lost: tuple[tuple[float, float], ...]
    losses: tuple[tuple[float, float], ...]
    decided_s: float
    loss_before: float
    loss_after: float


def story(target_s: float = TARGET_S, cost_s: float = COST_S, end_s: float = END_S) -> Story:
    """Calm, the load at 0.135, the decision, the restart, the same load at 0.30."""
    before = captured("30-pressure-u135-s256", 41.6, 95, 105, 0.99)
    after = captured("32-pressure-u30-s128", 27.18, 128, 72, 0.20)
    terms = Terms(Pressure(ttft_ns=round(target_s * SECOND)), 256, 60_128, cost_s, curable=frozenset({"kv"}))
    watch, at, decided = Watch(), 0.0, None
    lost, losses = [], []
    while decided is None and at <= end_s:
        watch = watch.scraped(before.page(at, max(0.0, at - LOAD_S)), terms)
        lost.append((at, watch.episode.lost_s))
        losses.append((at, watch.loss))
        decided = at if watch.due(terms) else None
        at += PAGE_S
    assert decided is not None, "slow for ever and never acted on"
    loss_before, healthy = watch.loss, decided + cost_s
    losses += [(decided, 1.0), (healthy, 1.0)]
    watch, at = Watch((after.page(healthy, 0.0),)), healthy + PAGE_S
    while at <= end_s:
        watch = watch.scraped(after.page(at, at - healthy), terms)
        losses.append((at, watch.loss))
        at += PAGE_S
    return Story(tuple(lost), tuple(losses), decided, loss_before, watch.loss)


WIDTH, HEIGHT = 760, 470
LEFT, RIGHT, TOP, MIDDLE, LOW, BOTTOM = 58, 740, 34, 300, 340, 420
MOST_S = 150.0

STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --faint: #d0d7de; --soft: #59636e;
        --ours: #0969da; --never: #cf222e; --best: #1a7f37; --shade: #ddf4ff; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #0d1117; --ink: #f0f6fc; --faint: #3d444d; --soft: #9198a1;
          --ours: #4493f8; --never: #f85149; --best: #3fb950; --shade: #121d2f; }
  }
  text { font: 12px system-ui, sans-serif; fill: var(--ink); }
  .soft { fill: var(--soft); } .mid { text-anchor: middle; } .end { text-anchor: end; }
  .grid { stroke: var(--faint); stroke-width: 1; } .line { fill: none; stroke-width: 2; }
  .ours { stroke: var(--ours); } .never { stroke: var(--never); stroke-dasharray: 7 4; }
  .best { stroke: var(--best); stroke-dasharray: 2 4; stroke-width: 3; }
  .rule { stroke: var(--ink); stroke-dasharray: 1 3; }
  .t-ours { fill: var(--ours); } .t-never { fill: var(--never); } .t-best { fill: var(--best); }
"""


def across(at_s: float) -> float:
    """Seconds to a place from the left."""
    return LEFT + (RIGHT - LEFT) * at_s / END_S


def upper(seconds: float) -> float:
    """Lost seconds to a place in the upper panel."""
    return MIDDLE - (MIDDLE - TOP) * seconds / MOST_S


def lower(loss: float) -> float:
    """A loss to a place in the lower panel."""
    return BOTTOM - (BOTTOM - LOW) * loss


def path(points: list[tuple[float, float]], scale: Callable[[float], float], css: str) -> str:
    """A line through points."""
    places = " ".join(f"{across(at):.1f},{scale(value):.1f}" for at, value in points)
    return f'<polyline class="line {css}" points="{places}"/>'


def label(x: float, y: float, text: str, css: str = "") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}">{text}</text>'


def drawing(told: Story) -> str:
    """The whole picture as SVG."""
    decided, healthy = told.decided_s, told.decided_s + COST_S
    at_decision = told.lost[-1][1]
    ours = [*told.lost, (healthy, at_decision + COST_S), (END_S, at_decision + COST_S)]
    never = [(LOAD_S, 0.0), (END_S, told.loss_before * (END_S - LOAD_S))]
    best = [(LOAD_S, 0.0), (LOAD_S + COST_S, COST_S), (END_S, COST_S)]
    total = at_decision + COST_S
    moment = f"S ≥ C after {decided - LOAD_S:.0f} s of it:"
    steps = [point for (a, _), (b, loss) in pairwise(told.losses) for point in ((a, loss), (b, loss))]
    shade = f'x="{across(decided):.1f}" width="{across(healthy) - across(decided):.1f}"'
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--paper)"/>',
        f'<rect {shade} y="{TOP}" height="{BOTTOM - TOP}" fill="var(--shade)"/>',
        *(
            f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{upper(y):.1f}" y2="{upper(y):.1f}"/>'
            + label(LEFT - 8, upper(y) + 4, f"{y:.0f}", "soft end")
            for y in (0, 50, 100, 150)
        ),
        *(
            f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{lower(y):.1f}" y2="{lower(y):.1f}"/>'
            + label(LEFT - 8, lower(y) + 4, f"{y:g}", "soft end")
            for y in (0, 1)
        ),
        *(label(across(x), BOTTOM + 18, f"{x:.0f}", "soft mid") for x in range(0, int(END_S) + 1, 60)),
        label((LEFT + RIGHT) / 2, BOTTOM + 38, "seconds; at 60 s the load comes", "soft mid"),
        label(LEFT, TOP - 14, "lost so far, in seconds of outage", "soft"),
        label(LEFT, LOW - 10, "loss: 0 nobody too late, 1 an outage", "soft"),
        f'<line class="line rule" x1="{LEFT}" x2="{RIGHT}" y1="{upper(COST_S):.1f}" y2="{upper(COST_S):.1f}"/>',
        label(LEFT + 6, upper(COST_S) - 6, f"C = {COST_S:g} s: a restart pays from here"),
        f'<line class="line rule" x1="{LEFT}" x2="{RIGHT}" y1="{upper(2 * COST_S):.1f}" y2="{upper(2 * COST_S):.1f}"/>',
        label(LEFT + 6, upper(2 * COST_S) - 6, "2C: from here after one change that was taken back"),
        path(never, upper, "never"),
        path(best, upper, "best"),
        path(ours, upper, "ours"),
        f'<circle cx="{across(decided):.1f}" cy="{upper(at_decision):.1f}" r="5" fill="var(--ours)"/>',
        label(across(decided) + 8, upper(22), moment, "t-ours"),
        label(across(decided) + 8, upper(22) + 15, "drain, then a larger KV cache", "t-ours"),
        label((across(decided) + across(healthy)) / 2, TOP + 14, "restart", "soft mid"),
        label(RIGHT - 6, upper(total) - 8, f"the rule: {total:.0f} s", "t-ours end"),
        label(RIGHT - 6, upper(COST_S) + 18, f"best in hindsight: at once, {COST_S:.0f} s", "t-best end"),
        label(across(500), upper(told.loss_before * 440) - 10, "never", "t-never end"),
        path(steps, lower, "ours"),
        label(across(LOAD_S) + 6, lower(told.loss_before) - 5, f"{told.loss_before:.2f}", "t-ours"),
        label(across(healthy) + 6, lower(told.loss_after) - 5, f"{told.loss_after:.2f}", "t-ours"),
    ]
    title = "Lost service against the cost of a restart"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


EXAMPLES = (("31-pressure-u135-s24", 24), ("30-pressure-u135-s256", 256), ("32-pressure-u30-s128", 128))
POLICY_S, GUESS_S = 5.0, 60.0
"""The example policy's target and its cost of the first restart."""
BOUND = {"kv": "KV cache", "slot": "slots", "compute": "the card"}


def example(name: str, sequences: int) -> str:
    """One capture as a row of docs/pressure.md: what the client and the gauges saw, and what the rule makes of it."""
    told = json.loads((CAPTURES / f"{name}.json").read_text(encoding="utf-8"))
    events = {event["what"]: event for event in told["events"]}
    rows, load, words = events["watch"]["rows"], events["load"], told["cmd"]
    window = [
        Sample(
            at_ns=place * SECOND,
            running=round(row["num_requests_running"]),
            waiting=round(row["num_requests_waiting"]),
            kv_usage=row["kv_cache_usage_perc"],
            preemptions=round(row["num_preemptions_total"]),
        )
        for place, row in enumerate(rows)
    ]
    last = parse_metrics((CAPTURES / f"{name}.metrics").read_text(encoding="utf-8"))
    before = Sample(at_ns=0, running=0, waiting=0, ttft=tuple((bound, 0) for bound, _ in last.ttft))
    after = Sample(at_ns=SECOND, running=0, waiting=0, ttft=last.ttft)
    late = late_share(before.ttft, after.ttft, POLICY_S)
    assert late is not None
    lost = loss(Pressure(ttft_ns=round(POLICY_S * SECOND)), before, after)
    utilization = words[words.index("--gpu-memory-utilization") + 1]
    cells = (
        f"{utilization} / {sequences}",
        f"{load['tok_s']:,}",
        f"{load['ttft50']:.1f} s",
        f"{max(sample.waiting for sample in window)}",
        f"{max(sample.kv_usage or 0.0 for sample in window):.2f}",
        f"{window[-1].preemptions}",
        f"{late:.2f}",
        f"{lost:.2f}",
        BOUND[binding(window, sequences)],
        f"{GUESS_S / lost:.0f} s",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    (ROOT / "docs" / "pressure.svg").write_text(drawing(story()), encoding="utf-8")
    for capture in EXAMPLES:
        print(example(*capture))
