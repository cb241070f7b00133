"""Lines with a label at the left, as everywhere in this program, and careful reading of what a daemon sent.

Pure. A daemon of another version may leave out or add what it likes: what is not of the expected kind reads as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from supervisord_vllm.cli.drawing import Pen, fitted, wrapped
from supervisord_vllm.cli.status import span
from supervisord_vllm.clock import parse_rfc3339

LABEL = 13
"""Cells of the labels at the left."""


@dataclass(frozen=True)
class Paper:
    """The width of the screen and the pen: entries with a label, as everywhere in this program."""

    width: int
    pen: Pen

    @property
    def room(self) -> int:
        """Cells right of the labels."""
        return max(1, self.width - LABEL)

    def entry(self, label: str, text: object, most: int = 1, style: str = "") -> list[Text]:
        """A label and a text in at most so many lines."""
        lines = wrapped(self.pen.clean(text), self.room, most) or [""]
        return [
            self.line(label if place == 0 else "", (line, style), style=style if place == 0 and style else "bold")
            for place, line in enumerate(lines)
        ]

    def line(self, label: str, *parts: tuple[str, str], style: str = "bold") -> Text:
        """One line of a label and parts, each with its style."""
        return Text.assemble((padded(fitted(self.pen.clean(label), LABEL - 1), LABEL), style), *parts)


def countdown(seconds: float) -> str:
    """``in 0:42``, ``in 1:02:05``, ``now``."""
    whole = int(seconds)
    if whole <= 0:
        return "now"
    if whole >= 86400:
        return f"in {span(whole)}"
    minutes, hours = whole // 60, whole // 3600
    return f"in {hours}:{minutes % 60:02d}:{whole % 60:02d}" if hours else f"in {minutes}:{whole % 60:02d}"


def padded(text: str, width: int) -> str:
    """A text with blanks up to so many cells."""
    return text + " " * max(0, width - cell_len(text))


def clock(now: float) -> str:
    """The time of day in UTC, as ``14:02:11``."""
    whole = int(now) % 86400
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def moment(text: object) -> float | None:
    """RFC 3339 in seconds since 1970."""
    try:
        return parse_rfc3339(str(text)) if text else None
    except (ValueError, OverflowError):
        return None


def number(value: object) -> float | None:
    """A finite number of a sensible size."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e18 < value < 1e18:
        return None
    return float(value)


def table(value: object) -> dict[str, Any]:
    """An object; anything else reads as an empty one."""
    return value if isinstance(value, dict) else {}


def listed(value: object) -> list[object]:
    """A list; anything else reads as an empty one."""
    return value if isinstance(value, list) else []
