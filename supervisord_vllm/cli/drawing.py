"""Drawing on a terminal with characters: sparklines, bars, and text cut to a width in cells.

Pure. Every text that comes from outside passes `Pen.clean`: no control character reaches the terminal, and where it
shows ASCII only, the rest is written in ASCII. Widths are cells, not characters: a Chinese character takes two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells, set_cell_size

from supervisord_vllm.redaction import printable

_SPOKEN = str.maketrans({"→": "->", "−": "-", "–": "-", "—": "-", "×": "x", "…": "...", "≥": ">=", "≤": "<=", "·": "-"})
LONGEST_TEXT = 4000
"""Characters of one text that are looked at; a screen holds no more."""


@dataclass(frozen=True)
class Pen:
    """The characters that a terminal can show. ``levels`` begin with nought; a gap is a blank."""

    ascii: bool = False

    @property
    def levels(self) -> str:
        """Heights of a sparkline, nought first."""
        return "_.:-=+*#" if self.ascii else "▁▂▃▄▅▆▇█"

    @property
    def mark(self) -> str:
        """Where a launch began, and how far the requested memory goes."""
        return "|" if self.ascii else "┃"

    @property
    def fills(self) -> tuple[str, str, str]:
        """Memory of ours, of others, and free; progress uses the first and the last."""
        return ("#", "x", ".") if self.ascii else ("█", "▓", "░")

    def clean(self, text: object) -> str:
        """Any text as one harmless line that this terminal can show."""
        line = printable(str(text)[:LONGEST_TEXT]).replace("\t", " ")
        if not self.ascii:
            return line
        return line.translate(_SPOKEN).encode("ascii", "replace").decode("ascii")


def spark(values: Sequence[float | None], marks: frozenset[int], top: float | None, pen: Pen) -> str:
    """One character a value: blank for the unknown, the lowest for nought, never the lowest for more than nought.

    ``marks`` are the places where a launch began; ``top`` is the value of the highest character, else the next 1, 2 or
    5 of its magnitude above the largest value: what is steady is no alarm, and the scale does not jump.
    """
    top = top or rounded_up(max((value for value in values if value is not None), default=0.0))
    last = len(pen.levels) - 1

    def level(value: float) -> str:
        if value <= 0 or top <= 0:
            return pen.levels[0]
        return pen.levels[max(1, min(last, round(value / top * last)))]

    drawn = (" " if value is None else level(value) for value in values)
    return "".join(pen.mark if place in marks else character for place, character in enumerate(drawn))


def rounded_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... (and 0.5, 0.2, ...) that is not below the value; nought for nought."""
    if value <= 0:
        return 0.0
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(step * magnitude for step in (1, 2, 5, 10, 20) if step * magnitude >= value * 0.9999)


def shares(parts: Sequence[float], width: int) -> list[int]:
    """How many of ``width`` cells each part gets; a part above nought gets at least one where there is room."""
    total = sum(parts)
    if total <= 0 or width <= 0:
        return [0] * len(parts)
    cells = [max(1, int(part / total * width)) if part > 0 else 0 for part in parts]
    while (over := sum(cells) - width) != 0:
        largest = max(range(len(parts)), key=lambda place: cells[place] if over > 0 else parts[place])
        cells[largest] -= max(1, min(over, cells[largest] - 1)) if over > 0 else over
    return cells


def fitted(text: str, width: int) -> str:
    """A text cut to so many cells."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width)).rstrip()


def ended(text: str, width: int) -> str:
    """The end of a text in so many cells, with two dots before it where its beginning is missing: names of weights
    differ at the end."""
    if cell_len(text) <= width:
        return text
    kept = text[-max(0, width - 2) :] if width > 2 else ""
    while kept and cell_len(kept) > width - 2:
        kept = kept[1:]
    return fitted(".." + kept, width)


def wrapped(text: str, width: int, most: int) -> list[str]:
    """A text in at most so many lines of so many cells; what does not fit is cut off with three dots."""
    lines = list(_lines(text, max(1, width)))
    if len(lines) <= most:
        return lines
    kept = lines[:most]
    kept[-1] = fitted(kept[-1], width - 4) + " ..." if width > 8 else kept[-1]
    return kept


def _lines(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width:
            line = joined
            continue
        if line:
            yield line
        *whole, line = chop_cells(word, width)
        yield from whole
    if line:
        yield line
