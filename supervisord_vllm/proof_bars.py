"""The ``proof`` object of the status document for a person: bars, percentages, and what was measured in the end.

Imports the standard library only: ``status`` starts in no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARTS = ("canary", "burst", "soak")
WIDTH = 10
"""Characters of one bar."""


def percents(shown: Mapping[str, Any]) -> dict[str, int]:
    """Percent by part, without a burst that there is not."""
    return {part: int(shown[part]["percent"]) for part in PARTS if shown.get(part) is not None}


def bar(percent: int, *, plain: bool = False) -> str:
    """A bar of `WIDTH` characters; ``plain`` for a terminal without box characters."""
    full = max(0, min(WIDTH, percent * WIDTH // 100))
    return ("#" if plain else "█") * full + ("." if plain else "░") * (WIDTH - full)


def line(shown: Mapping[str, Any], *, plain: bool = False) -> str:
    """The whole proof in one line: ``canary ██████████ burst ███░░░░░░░ 5 of 16 soak ░░░░░░░░░░``."""
    parts = []
    for part, percent in percents(shown).items():
        text = f"{part} {bar(percent, plain=plain)}"
        burst = shown["burst"]
        if part == "burst" and percent < 100:
            text += f" {burst['done']} of {burst['requests']}" + (", yields to real traffic" if burst["yields"] else "")
        elif 0 < percent < 100:
            text += f" {percent} %"
        parts.append(text)
    return "  ".join(parts)


def summary(shown: Mapping[str, Any]) -> str:
    """A proof that is over, in one line for a person: what was measured."""
    burst, soak, said = shown.get("burst"), shown["soak"], []
    first = shown["canary"].get("first_token_s")
    if first is not None:
        said.append(f"first token after {first:.2f} s")
    if burst is not None and burst.get("answered") is not None:
        median = f", first token {burst['first_token_s']:.2f} s (median)" if burst.get("first_token_s") else ""
        rest = f" ({burst['detail']})" if burst.get("detail") else ""
        said.append(
            f"{burst['answered']} of {burst['requests']} at once answered in {burst['seconds']:g} s{median}{rest}"
        )
    if soak.get("finding"):
        said.append(f"memory: {soak['finding']}")
    return "; ".join(said)
