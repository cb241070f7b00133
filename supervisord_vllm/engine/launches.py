"""Several launches in one file: the last one counts, the earlier ones are listed with their verdicts.

A new launch begins where the server says its version again, and with the first line of an engine after the log told of
an exit (a journal's "Main process exited", docker's "exited with code"). What an operator pastes behind an exit belongs
to the launch before it. Only for files: the daemon gives every launch a log of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from supervisord_vllm.core.diagnosis import Diagnosis
from supervisord_vllm.engine.circumstance import Outside
from supervisord_vllm.engine.classifier import Classifier
from supervisord_vllm.engine.lines import LIMIT, parse, segments
from supervisord_vllm.engine.signature import Catalogue

if TYPE_CHECKING:
    from supervisord_vllm.core.facts import Phase

MAX_EARLIER: Final = 1000
"""Launches that are kept; of a longer file the latest."""

_VERSION: Final = re.compile(r"^vLLM (?:API )?server version \d")
_LOGO: Final = re.compile(r"[█▀▄ ]  version \d[\w.+-]{1,60}$")
_ENGINE_LINE: Final = re.compile(r"\((?:EngineCore|Worker|VllmWorker|APIServer|ApiServer)[^)]{0,60}pid=")
_EXIT: Final = re.compile(
    r": Main process exited, code=|child exited: |exited with code \d|: Scheduled restart job|: Started |start #\d"
)
_HINTS: Final = (" version ", "xited", "restart job", ": Started ", "start #")


@dataclass(frozen=True)
class Launch:
    """One launch of a file: its first and last line, how far it came, and the verdict."""

    first: int
    last: int
    phase: Phase | None
    verdict: Diagnosis


class Launches:
    """Feed a file's lines in order; then ask for the last verdict and for the launches before it."""

    def __init__(self, outside: Outside | None = None, signatures: Catalogue | None = None) -> None:
        self._outside = outside or Outside(log_only=True)
        self._signatures = signatures
        self._current = Classifier(signatures, kernel_lines=True)
        self._first = 1
        self._started = False
        self._exited = False
        self._earlier: list[Launch] = []

    @property
    def earlier(self) -> tuple[Launch, ...]:
        """The launches before the last one, oldest first."""
        return tuple(self._earlier)

    @property
    def current(self) -> Classifier:
        """The classifier of the last launch."""
        return self._current

    def feed(self, line: bytes | str) -> None:
        """Take one raw line without its newline."""
        if not self._exited and self._current.passed(line):
            return
        if self._looks_like_an_edge(line):
            self._edge(line)
        self._current.look(line)

    def feed_block(self, block: bytes) -> None:
        """Take a block of whole lines, each with its newline: the same as `feed` line by line, faster."""
        at, size = 0, len(block)
        while at < size:
            if not self._exited:
                behind = self._current.passed_run(block, at)
                if behind > at:
                    at = behind
                    continue
            end = block.find(b"\n", at)
            end = size if end < 0 else end
            self.feed(block[at : min(end, at + LIMIT)])
            at = end + 1

    def verdict(self, *, outside: Outside | None = None) -> Diagnosis:
        """The verdict on the last launch."""
        return self._current.verdict(
            outside=outside or self._outside, earlier=tuple(launch.verdict for launch in self._earlier)
        )

    def last(self) -> Launch:
        """The last launch itself."""
        return Launch(self._first, self._current.line, self._current.phase, self.verdict())

    def _looks_like_an_edge(self, line: bytes | str) -> bool:
        if self._exited:
            return True
        if isinstance(line, bytes):
            return any(hint in line for hint in _RAW_HINTS)
        return any(hint in line for hint in _HINTS)

    def _edge(self, raw: bytes | str) -> None:
        for text in segments(raw[:LIMIT]):
            for line in parse(text, 0):
                if line.role in ("api", "") and (_VERSION.match(line.text) or _LOGO.search(line.text)):
                    if self._started or self._exited or self._current.phase not in (None, "importing"):
                        self._next()
                    self._started = True
                elif self._exited and line.tagged and _ENGINE_LINE.search(text):
                    self._next()
                elif not line.tagged and line.level == "" and _EXIT.search(line.text):
                    self._exited = self._exited or "exited" in line.text
                    return

    def _next(self) -> None:
        """The launch ended; another one begins with the line that comes now."""
        self._exited = False
        if self._current.line < self._first:
            return
        self._earlier.append(self.last())
        del self._earlier[:-MAX_EARLIER]
        self._first = self._current.line + 1
        self._started = False
        self._current = Classifier(self._signatures, kernel_lines=True, number=self._current.line)


_RAW_HINTS: Final = tuple(hint.encode() for hint in _HINTS)


def read(lines: Iterable[bytes | str], outside: Outside | None = None, signatures: Catalogue | None = None) -> Launches:
    """All launches of a file's lines."""
    launches = Launches(outside, signatures)
    for line in lines:
        launches.feed(line)
    return launches
