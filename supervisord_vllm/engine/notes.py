"""What was seen beside a cause: how often each note came, its first and last numbers, and whether they only ever fell
or
rose. Bounded: one record per kind of note, whatever the length of the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from supervisord_vllm.core.diagnosis import Evidence, Number

MAX_VALUES = 32
"""Distinct values of one name that are kept (which Xids, which victims)."""


@dataclass
class Note:
    """One kind of note. ``evidence`` is its first line; ``changes`` counts neighbouring values of its first number that
    differ, ``falls`` and ``rises`` those that went down and up.
    """

    evidence: Evidence
    count: int = 1
    first: dict[str, Number] = field(default_factory=dict)
    last: dict[str, Number] = field(default_factory=dict)
    values: dict[str, list[Number]] = field(default_factory=dict)
    falls: int = 0
    rises: int = 0

    @property
    def fell_throughout(self) -> bool:
        """Whether its number only ever went down, at least twice."""
        return self.falls >= 2 and self.rises == 0

    @property
    def rose_throughout(self) -> bool:
        """Whether its number only ever went up, at least three times."""
        return self.rises >= 3 and self.falls == 0

    def add(self, numbers: dict[str, Number]) -> None:
        """One more of it."""
        self.count += 1
        name = next(iter(numbers), None)
        if name is not None:
            before, now = self.last.get(name), numbers[name]
            if isinstance(before, (int, float)) and isinstance(now, (int, float)):
                self.falls += now < before
                self.rises += now > before
        self.last = numbers
        self.remember(numbers)

    def remember(self, numbers: dict[str, Number]) -> None:
        """Keep the distinct values."""
        for name, value in numbers.items():
            seen = self.values.setdefault(name, [])
            if value not in seen and len(seen) < MAX_VALUES:
                seen.append(value)

    def number(self, name: str) -> float | None:
        """The last value of a number, or ``None``."""
        value = self.last.get(name)
        return float(value) if isinstance(value, (int, float)) else None


class Notes:
    """All notes of one launch, by the id of their signature."""

    def __init__(self) -> None:
        self._notes: dict[str, Note] = {}

    def add(self, identity: str, evidence: Evidence, numbers: dict[str, Number]) -> None:
        """Note a line."""
        note = self._notes.get(identity)
        if note is None:
            note = self._notes[identity] = Note(evidence, first=numbers, last=numbers)
            note.remember(numbers)
        else:
            note.add(numbers)

    def __getitem__(self, identity: str) -> Note | None:
        return self._notes.get(identity)

    def __contains__(self, identity: str) -> bool:
        return identity in self._notes

    def __iter__(self) -> Iterator[str]:
        return iter(self._notes)

    def count(self, identity: str) -> int:
        """How often it came."""
        note = self._notes.get(identity)
        return 0 if note is None else note.count

    def number(self, identity: str, name: str) -> float | None:
        """The last value of a note's number, or ``None``."""
        note = self._notes.get(identity)
        return None if note is None else note.number(name)

    def forget(self, *identities: str) -> None:
        """Drop what no longer counts (a start that went on was not wedged)."""
        for identity in identities:
            self._notes.pop(identity, None)
