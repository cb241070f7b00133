"""The live view as lines of text: a pure function of documents, time and the size of the screen.

Every document is read with suspicion: a daemon of another version may leave out or add what it likes, and texts in it
come from logs. No line is wider than the screen, and what is least needed goes first where the screen is low.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from supervisord_vllm.cli import gauges
from supervisord_vllm.cli.drawing import Pen, ended, fitted, shares
from supervisord_vllm.cli.paper import LABEL, Paper, clock, countdown, listed, moment, number, padded, table
from supervisord_vllm.cli.status import span
from supervisord_vllm.cli.timeline import ROWS, Row, Timeline, drawn
from supervisord_vllm.status import NO_DAEMON, Document, show_lever

DECISIONS = 3
GIB = 1 << 30
_STATE_STYLES = {"serving": "bold green", "stopped": "bold", "given-up": "bold red", NO_DAEMON: "bold red"}
_FILL_STYLES = ("green", "magenta", "dim")
_WORDS = ("ours ", "others ", "free ", "requested ")
_FORMS = ((_WORDS, "  "), (_WORDS, " "), (("",) * 4, " "))
"""How the numbers of a card are written, the roomiest first: with which words, and what is between them."""


@dataclass(frozen=True)
class Scene:
    """What is known: the status document, the series, the last decisions (oldest first), and what is wrong, if it is.

    ``now`` is the wall time in seconds since 1970.
    """

    status: Document
    now: float
    timeline: Timeline = field(default_factory=Timeline)
    decisions: Sequence[Document] = ()
    trouble: str = ""


@dataclass(frozen=True)
class _Block:
    """Lines that stay or go together; ``rank`` 0 stays, the highest goes first."""

    rank: int
    lines: list[Text]


def view(scene: Scene, width: int, height: int, pen: Pen) -> list[Text]:
    """The whole picture: at most ``height`` lines, none wider than ``width`` cells."""
    blocks = [block for block in _blocks(scene, width, pen) if block.lines]
    while sum(len(block.lines) for block in blocks) > height:
        rank = max(block.rank for block in blocks)
        if rank == 0:
            break
        del blocks[max(place for place, block in enumerate(blocks) if block.rank == rank)]
    lines = [line for block in blocks for line in block.lines][: max(0, height)]
    for line in lines:
        line.truncate(max(0, width), overflow="crop")
    return lines


def _blocks(scene: Scene, width: int, pen: Pen) -> Iterator[_Block]:
    status = scene.status
    paper = Paper(width, pen)
    yield _Block(0, [_headline(status, scene.now, paper)])
    if scene.trouble:
        yield _Block(0, paper.entry("!", scene.trouble, most=2, style="bold red"))
    if status.get("given_up"):
        yield _Block(0, paper.entry("given up", status["given_up"], most=4, style="red"))
    if status.get("state") != NO_DAEMON:
        yield _Block(0, paper.entry("next", _next(table(status.get("next")), scene.now), most=2))
    yield _Block(1, _hold(status, scene.now, paper))
    yield _Block(1, gauges.proof(table(status.get("proof")), paper))
    yield _Block(2, gauges.pressure(table(status.get("pressure")), paper))
    yield _Block(9, [Text()])
    yield from _launch(status, scene.now, paper)
    yield from _memory(status, paper)
    yield _Block(9, [Text()])
    yield from _timelines(scene, paper)
    yield _Block(9, [Text()])
    yield from _decisions(scene, paper)


def _headline(status: Document, now: float, paper: Paper) -> Text:
    state = paper.pen.clean(status.get("state"))
    name = paper.pen.clean(status.get("name"))
    if state == NO_DAEMON:
        shown = "no daemon runs"
    else:
        flags = (
            ("ready", status.get("ready")),
            ("proven", status.get("proven")),
            ("below what was declared", status.get("degraded")),
            ("held", status.get("held")),
            ("only watching (act = false)", status.get("act") is False),
        )
        shown = ", ".join([state, *(word for word, is_so in flags if is_so is True)])
    since = moment(status.get("since"))
    rest = "" if since is None or state == NO_DAEMON else f" for {span(max(0.0, now - since))}"
    time = f"{clock(now)} UTC"
    left = Text.assemble((f"{name}: ", "bold"), (shown, _STATE_STYLES.get(state, "bold yellow")), rest)
    gap = paper.width - left.cell_len - len(time)
    return left if gap < 2 else Text.assemble(left, " " * gap, (time, "dim"))


def _next(coming: dict[str, Any], now: float) -> str:
    at = moment(coming.get("at"))
    what = str(coming.get("what") or "nothing")
    word = "not before" if coming.get("earliest") is True else "at the latest"
    return what if at is None else f"{what}, {word} {countdown(at - now)}"


def _hold(status: Document, now: float, paper: Paper) -> list[Text]:
    """Who holds the configuration, for how long yet, and why."""
    hold = table(status.get("hold"))
    if not hold:
        return []
    until = moment(hold.get("until"))
    ends = "until `resume`" if until is None else f"until {clock(until)} UTC ({countdown(until - now)})"
    why = f": {hold['reason']}" if hold.get("reason") else ""
    return paper.entry("hold", f"by {hold.get('by') or 'somebody'}, {ends}{why}", most=2, style="yellow")


def _launch(status: Document, now: float, paper: Paper) -> Iterator[_Block]:
    launch = table(status.get("launch"))
    if launch:
        started, ended = moment(launch.get("started_at")), launch.get("ended_at")
        parts = [f"pid {launch['pid']}"] if launch.get("pid") and not ended else []
        parts += [f"started {span(max(0.0, now - started))} ago"] if started is not None else []
        if ended:
            parts.append(f"ended: {launch.get('outcome') or 'outcome unknown'}")
        elif launch.get("phase") and status.get("ready") is not True:
            parts.append(f"phase {launch['phase']}")
        yield _Block(3, paper.entry(f"launch {launch.get('number')}", ", ".join(parts)))
    yield _Block(5, _levers(status, launch, paper))
    back = table(status.get("way_back"))
    if back.get("waits_for"):
        at = moment(back.get("at"))
        yield _Block(
            7, paper.entry("way back", f"{back['waits_for']}" + ("" if at is None else f" ({countdown(at - now)})"))
        )


def _levers(status: Document, launch: dict[str, Any], paper: Paper) -> list[Text]:
    running, declared, ceilings = (
        table(launch.get("levers")),
        table(status.get("declared")),
        table(status.get("ceilings")),
    )
    names = [*dict.fromkeys((*declared, *running))]
    if not names:
        return []
    widest = min(26, max(cell_len(paper.pen.clean(name)) for name in names) + 1)
    column = max(10, min(20, (paper.width - LABEL - widest) // 3))
    degraded = status.get("degraded_levers")
    below = degraded if isinstance(degraded, list) else []

    def cell(value: object, style: str = "") -> tuple[str, str]:
        return ended(paper.pen.clean(value), column - 1).rjust(column), style

    title = paper.line("levers", (" " * widest, ""), *(cell(word, "dim") for word in ("declared", "now", "ceiling")))
    lines = [title]
    for name in names[:12]:
        shown = [show_lever(name, table[name]) if name in table else "-" for table in (declared, running, ceilings)]
        lines.append(
            paper.line(
                "",
                (padded(fitted(paper.pen.clean(name), widest - 1), widest), ""),
                cell(shown[0]),
                cell(shown[1], "bold yellow" if name in below else "bold"),
                cell(shown[2]),
            )
        )
    return lines


def _memory(status: Document, paper: Paper) -> Iterator[_Block]:
    devices = [table(device) for device in listed(status.get("memory"))]
    for device in devices:
        yield _Block(4, _device(device, paper, alone=len(devices) < 3))
        yield _Block(8, _holders(device, paper))
    if status.get("memory_error"):
        yield _Block(4, paper.entry("memory", f"unknown: {status['memory_error']}", style="yellow"))


def _device(device: dict[str, Any], paper: Paper, *, alone: bool) -> list[Text]:
    """The card as a bar: ours, others', free; a mark where the requested memory ends. The numbers stand below it, or
    where there are many cards beside it."""
    name = str(device.get("gpu"))
    label = name[:12] if name.startswith(("GPU-", "MIG-")) else name.replace("host-memory", "memory")
    total, free = number(device.get("total_bytes")), number(device.get("free_bytes"))
    if total is None or free is None or total <= 0:
        return paper.entry(label, "unknown")
    own = min(number(device.get("own_bytes")) or 0.0, total)
    wanted = number(device.get("requested_bytes"))
    parts = [own, max(0.0, total - free - own), max(0.0, free)]
    forms = [_numbers(parts, wanted, total, paper.pen, *form) for form in _FORMS[0 if alone else 2 :]]
    numbers = next((form for form in forms if sum(cell_len(text) for text, _ in form) <= paper.room), forms[-1])
    cells = paper.room if alone else max(8, paper.room - sum(cell_len(text) for text, _ in numbers) - 1)
    bar = [
        (fill, style)
        for fill, style, size in zip(paper.pen.fills, _FILL_STYLES, shares(parts, cells), strict=True)
        for _ in range(size)
    ]
    if wanted is not None and bar:
        bar[min(len(bar) - 1, max(0, int(wanted / total * len(bar))))] = (paper.pen.mark, "bold")
    if alone:
        return [paper.line(label, *bar), paper.line("", *numbers)]
    return [paper.line(label, *bar, (" ", ""), *numbers)]


def _numbers(
    parts: Sequence[float], wanted: float | None, total: float, pen: Pen, words: Sequence[str], between: str
) -> list[tuple[str, str]]:
    found = [
        (f"{fill} {word}{part / GIB:.1f}{between}", style)
        for fill, word, part, style in zip(pen.fills, words, parts, _FILL_STYLES, strict=False)
    ]
    if wanted is not None:
        found.append((f"{pen.mark} {words[3]}{wanted / GIB:.1f}{between}", "bold"))
    return [*found, (f"of {total / GIB:.1f} GiB", "")]


def _growth(growth: dict[str, Any], paper: Paper) -> list[Text]:
    """Memory that creeps."""
    if growth.get("creeps") is not True:
        return []
    rate, low, high = ((number(growth.get(name)) or 0.0) / 2**20 for name in ("bytes_per_hour", "low", "high"))
    seen = f"{growth.get('hours')} h"
    return paper.entry(
        "", f"ours grows {rate:.0f} MiB/h (95 %: {low:.0f} to {high:.0f}, seen over {seen})", style="yellow"
    )


def _holders(device: dict[str, Any], paper: Paper) -> list[Text]:
    foreign = [one for one in map(table, listed(device.get("holders"))) if one and not one.get("ours")]
    foreign.sort(key=lambda one: -(number(one.get("memory_bytes")) or 0.0))
    lines = _growth(table(device.get("growth")), paper)
    for one in foreign[:2]:
        size = number(one.get("memory_bytes"))
        held = "" if size is None else f" holds {size / GIB:.1f} GiB"
        lines += paper.entry("", f"pid {one.get('pid')} ({one.get('command') or 'unknown'}){held}", style="magenta")
    return lines


def _timelines(scene: Scene, paper: Paper) -> Iterator[_Block]:
    line, pen, now = scene.timeline, paper.pen, scene.now
    aims = table(scene.status.get("pressure"))
    told = 9 if paper.width < 76 else 22 if paper.width < 100 else 36
    cells = max(1, paper.room - told - 1)
    begun = [f"{which} {span(now - at)} ago" for at, which in line.launches if now - 900 < at <= now]
    title = "what /metrics said" + (f"; {pen.mark} launch {', '.join(begun[-3:])}" if begun else "")
    yield _Block(3, paper.entry("last 15 min", title, style="dim"))
    for place, row in enumerate(ROWS):
        picture = drawn(line, row, cells, now, pen)
        text = _told(line, row, now, most=told > 9) + (gauges.target(aims, row.column) if told > 22 else "")
        yield _Block(3 if place < 3 else 4 + place // 2, [paper.line(row.label, (picture, "cyan"), (f" {text}", ""))])


def _told(line: Timeline, row: Row, now: float, *, most: bool) -> str:
    known = line.known(row.column, now)
    if row.summed:
        return f"{row.show(sum(known)) if known else '-':>8}" + ("  in all" if most else "")
    latest = line.latest(row.column, now)
    text = f"{'-' if latest is None else row.show(latest):>8}"
    return text + (f"  most {row.show(max(known))}" if most and known else "")


def _decisions(scene: Scene, paper: Paper) -> Iterator[_Block]:
    last = table(scene.status.get("decision"))
    told = [table(one) for one in scene.decisions]
    known = [one for one in told if one and one.get("number") != last.get("number")]
    newest = [*([last] if last else []), *reversed(known)][:DECISIONS]
    if not newest:
        yield _Block(6, paper.entry("decisions", "none yet"))
    for place, decision in enumerate(newest):
        at = moment(decision.get("at"))
        parts = ["" if at is None else f"{span(max(0.0, scene.now - at))} ago:", str(decision.get("sentence") or "")]
        parts += [f"Outcome: {decision['outcome']}."] if decision.get("outcome") else []
        text = " ".join(filter(None, parts))
        label = f"decision {decision.get('number')}"
        if place == 0:
            yield _Block(2, paper.entry(label, text, most=6))
        else:
            yield _Block(6, paper.entry(label, text, most=2))
