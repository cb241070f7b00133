"""Pressure in words, for ``status`` and its live view. Imports the standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BOUND = {"kv": "the KV cache", "slot": "the number of sequences", "compute": "the card itself"}
JUDGING = "the last change is being measured: it stays if less is late now"


def cost(pressure: Mapping[str, Any]) -> tuple[float, float] | None:
    """S, and the S at which a restart pays, in outage-equivalent seconds; ``None`` where nothing is lost."""
    lost, worth = _number(pressure.get("lost_s")), _number(pressure.get("worth_s"))
    return None if lost <= 0 or worth <= 0 else (lost, worth)


def situation(pressure: Mapping[str, Any]) -> str:
    """How much is late now, what binds, and what helps."""
    bound = BOUND.get(str(pressure.get("verdict")), "nothing known")
    text = f"{_number(pressure.get('loss')):.0%} of the service is late now, bound by {bound}"
    if pressure.get("curable") is True:
        return f"{text}; a restart pays at {_number(pressure.get('worth_s')):.0f} s of outage"
    engines = _number(pressure.get("engines_needed"))
    return f"{text}; no permitted change helps" + (f", {engines:.1f} engines would" if engines > 0 else "")


def told(pressure: Mapping[str, Any]) -> str:
    """All of it in one line; empty where nothing is lost and nothing is being measured."""
    if pressure.get("judging") is True:
        return JUDGING
    counted = cost(pressure)
    return "" if counted is None else f"{counted[0]:.0f} s lost so far: {situation(pressure)}"


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e12 < value < 1e12:
        return 0.0
    return float(value)
