"""What is under way, as bars of the live view: a launch's proof, and pressure on its way to a restart.

Pure; documents are read with suspicion, as everywhere in the view.
"""

from __future__ import annotations

from typing import Any

from rich.text import Text

from supervisord_vllm.cli.paper import Paper, number, table
from supervisord_vllm.cli.strained import JUDGING, cost, situation
from supervisord_vllm.cli.timeline import seconds

PARTS = ("canary", "burst", "soak")
GAUGE = 20
"""Cells of the bar of S."""


def proof(shown: dict[str, Any], paper: Paper) -> list[Text]:
    """Canary, burst and soak of a launch that is being proven; nothing before and after."""
    if shown.get("part") not in PARTS:
        return []
    parts = [(name, table(shown.get(name))) for name in PARTS if table(shown.get(name))]
    size = max(1, paper.room // max(1, len(parts)) - len("canary  100%  "))
    found: list[tuple[str, str]] = []
    for name, part in parts:
        percent = min(100.0, max(0.0, number(part.get("percent")) or 0.0))
        told = f"{percent:.0f}%"
        done, asked = number(part.get("done")), number(part.get("requests"))
        if name == "burst" and done is not None and asked is not None and percent < 100:
            told = f"{done:.0f}/{asked:.0f}"
        found += [(f"{name} ", "bold" if shown["part"] == name else ""), *bar(percent / 100, size, paper)]
        found.append((f" {told}  ", ""))
    lines = [paper.line("proof", *found)]
    if table(shown.get("burst")).get("yields") is True:
        lines += paper.entry("", "the burst yields to real traffic", style="dim")
    return lines


def pressure(shown: dict[str, Any], paper: Paper) -> list[Text]:
    """What slowness has cost so far of what makes a restart pay, what binds, and what can be done."""
    if shown.get("judging") is True:
        return paper.entry("pressure", JUDGING, most=2)
    counted = cost(shown)
    if counted is None:
        return []
    lost, worth = counted
    words = f" {lost:.0f} of {worth:.0f} s"
    size = min(GAUGE, max(1, paper.room - len(words)))
    lines = [paper.line("pressure", *bar(min(1.0, lost / worth), size, paper), (words, ""))]
    return [*lines, *paper.entry("", situation(shown), most=2)]


def target(shown: dict[str, Any], column: str) -> str:
    """The target of a column of the series, in words; empty where there is none."""
    wanted = number(table(shown.get("targets")).get(column))
    return "" if wanted is None or wanted <= 0 else f"  target {seconds(wanted)}"


def bar(part: float, size: int, paper: Paper) -> list[tuple[str, str]]:
    """A bar of so many cells, of which a part is full."""
    full, _, empty = paper.pen.fills
    filled = min(size, max(0, int(part * size)))
    return [(full * filled, "cyan"), (empty * (size - filled), "dim")]
