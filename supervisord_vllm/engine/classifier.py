"""The classifier: an engine's output, line by line, to events at once and to one `Diagnosis` in the end.

Used live by the daemon and on files by ``vllm-supervise diagnose``; both give the same verdict for the same lines.

Contract: `Classifier.feed` never raises, whatever the bytes; time is linear in the line and memory is bounded
(candidate lines, the first error lines and the latest tracebacks are kept, never the log). Text names a kind, it never
proves that an engine failed: a running engine whose log quotes an error gets ``none``. What makes a line evidence:

* who wrote it: engine processes, or untagged exceptions and records; what the API server logs once it serves may quote
  prompts and is never a cause. Where the engine's lines are tagged, an untagged line found while serving is no cause;
* its level: an INFO line is never a cause;
* its place: what came before "Application startup complete." was survived; what comes after the first stop signal
  (ours, see `Classifier.cut`, or the server's own notice of one) is shutdown noise;
* the first of all causes wins; covers, repetitions and after-shocks are skipped, in whatever order they arrive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from supervisord_vllm.core.diagnosis import Diagnosis, Evidence, Number
from supervisord_vllm.core.facts import Phase
from supervisord_vllm.engine.events import Event, FatalEvent, LedgerEvent, PhaseEvent
from supervisord_vllm.engine.frames import Frames
from supervisord_vllm.engine.judgement import Finding, Record, evidence, judge
from supervisord_vllm.engine.lines import LIMIT, Line, parse, segments
from supervisord_vllm.engine.oom import holders, outcome
from supervisord_vllm.engine.signature import Catalogue, Signature, catalogue
from supervisord_vllm.engine.stats import Load

__all__ = ["Classifier", "Event", "FatalEvent", "LedgerEvent", "PhaseEvent", "classify"]

MAX_CAUSES: Final = 32
MAX_ERRORS: Final = 5

_PHASES: Final[tuple[Phase, ...]] = ("importing", "weights", "compiling", "profiling", "capturing", "serving")
_MARKS: Final = ("rror", "xception", "CRITICAL", "ERROR", "Traceback", 'File "')
"""Together with the anchors: what a line must contain to be looked at closer."""
_EXCEPTION: Final = re.compile(
    r"(?:[\w.]{1,120}\.)?[A-Z]\w{0,80}(?:Error|Exception|Exit|Interrupt)(?::|\(|$)|(?:Exception|AssertionError): "
)
_FAILED_LEVELS: Final = ("ERROR", "CRITICAL")


class Classifier:
    """One launch's output. Feed lines in order; ask for the verdict when the output ended (or at any time).

    ``kernel_lines``: believe lines of the kernel log, which a journal may hold and an engine's own output never does.
    """

    def __init__(self, signatures: Catalogue | None = None, *, kernel_lines: bool = False) -> None:
        self._catalogue = signatures if signatures is not None else catalogue()
        self._kernel_lines = kernel_lines
        self._number = 0
        self._phase: Phase | None = None
        self._serving = False
        self._tagged = False
        self._cut = False
        self._stopping = False
        self._fatal = self._start_failed = self._raised = self._dead = False
        self._marker: Evidence | None = None
        self._causes: dict[str, Finding] = {}
        self._symptom: Finding | None = None
        self._hint: Finding | None = None
        self._errors: list[Evidence] = []
        self._ledger: dict[str, Number] = {}
        self._frames = Frames()
        self._load = Load()

    @property
    def ledger(self) -> dict[str, Number]:
        """A copy of the numbers seen so far, the later ones in place of the earlier."""
        return dict(self._ledger)

    def feed(self, line: bytes | str) -> list[Event]:
        """Take one raw line without its newline; the events that it is worth, in order."""
        self._number += 1
        events: list[Event] = []
        if self._phase is None:
            self._advance("importing", events)
        for text in segments(line[:LIMIT]):
            if any(mark in text for mark in _MARKS) or self._catalogue.hints(text) or '"levelname"' in text:
                for parsed in parse(text, self._number):
                    self._line(parsed, events)
        return events

    def cut(self) -> None:
        """Our own first stop signal was sent: nothing from here on can be a cause."""
        self._cut = True

    def verdict(
        self, *, exit_code: int | None = None, exit_signal: int | None = None, expected_stop: bool = False
    ) -> Diagnosis:
        """The first cause of what happened. ``expected_stop``: the exit, if any, is one that we asked for."""
        died = self._fatal or self._dead or self._start_failed or self._symptom is not None
        died = died or (self._hint is not None and not self._serving)
        exited = not expected_stop and (exit_code is not None or exit_signal is not None)
        cause = self._first_cause(failed=died or exited)
        symptom = (self._hint or self._symptom) if died or exited else None
        if self._raised and self._errors:
            symptom = None
        failed = died or (not self._serving and bool(self._errors))
        return judge(
            Record(
                cause=cause,
                symptom=symptom,
                errors=tuple(self._errors),
                marker=self._marker,
                failed=failed,
                serving=self._runtime,
                stopping=self._stopping,
                ledger=self._ledger,
                load=self._load.judge(),
                exit_code=exit_code,
                exit_signal=exit_signal,
                expected_stop=expected_stop,
            )
        )

    @property
    def _runtime(self) -> bool:
        return not self._start_failed and (self._serving or self._fatal)

    def _first_cause(self, *, failed: bool) -> Finding | None:
        """The first cause; a tagged one where the engine tags its lines, since what is untagged can be quoted."""
        causes = [finding for finding in self._causes.values() if self._admissible(finding, failed=failed)]
        if not causes:
            return None
        tagged = [finding for finding in causes if finding.line.tagged and finding.line.role == "engine"]
        first = (tagged or causes)[0]
        if first.outcome is not None:
            return first
        numbers = dict(first.numbers)
        verdict = outcome(self._catalogue, first.frames, first.phase, numbers, serving=self._runtime)
        return Finding(first.line, verdict, numbers, first.phase, first.frames)

    def _admissible(self, finding: Finding, *, failed: bool) -> bool:
        """Whether a candidate may be the cause. While serving, an untagged line proves nothing by itself."""
        return finding.line.tagged or finding.line.source == "uvicorn" or not self._serving or failed

    def _line(self, line: Line, events: list[Event]) -> None:
        if line.tagged and line.role == "engine":
            self._tagged = True
        framed = self._frames.feed(line.stream, line.text)
        hits = [hit for hit in self._catalogue.matches(line.text) if self._is_from(hit[0], line)]
        wrapper = False
        printed: dict[str, Number] = {}
        for signature, numbers in hits:
            if signature.use == "wrapper":
                wrapper = True
            elif signature.use == "ledger":
                printed.update(numbers)
            elif signature.use in ("phase", "stats"):
                self._progress(signature, numbers, events)
            elif not (self._cut or self._stopping):
                self._marks(signature, line, events)
            if signature.use == "stopping" and not self._failing:
                self._stopping = True
        if printed:
            self._ledger.update(printed)
            events.append(LedgerEvent(printed))
        if wrapper or self._cut or self._stopping:
            return
        for signature, numbers in hits:
            if signature.use in ("cause", "symptom"):
                self._candidate(signature, line, numbers)
                return
        if not framed and not any(signature.use != "ledger" for signature, _ in hits):
            self._error(line)

    @property
    def _failing(self) -> bool:
        return self._fatal or self._start_failed or self._dead or self._symptom is not None or bool(self._causes)

    def _is_from(self, signature: Signature, line: Line) -> bool:
        """Whether the line's writer and level are ones that this signature may be believed from."""
        if signature.level == "error" and line.level not in ("", *_FAILED_LEVELS):
            return False
        names_kind = signature.use in ("cause", "symptom")
        if names_kind and not (line.tagged or line.level or signature.bare or _EXCEPTION.match(line.text)):
            return False
        if line.role == "kernel" and not self._kernel_lines:
            return False
        if signature.role == "startup" or signature.use == "ledger":
            return not self._serving
        if signature.role == "server":
            return line.role in ("api", "")
        if signature.role == "engine":
            return line.role in ("engine", "") and not self._quotable(signature, line)
        return not self._quotable(signature, line) or line.role == "api"

    def _quotable(self, signature: Signature, line: Line) -> bool:
        """An untagged line of a serving engine that tags its own: a traceback that may quote what a client sent."""
        return (
            signature.use in ("cause", "fatal", "start-failed", "raised")
            and self._serving
            and self._tagged
            and not line.tagged
            and line.role == ""
        )

    def _progress(self, signature: Signature, numbers: dict[str, Number], events: list[Event]) -> None:
        if signature.use == "stats":
            self._advance("serving", events)
            if not (self._cut or self._stopping):
                self._load.feed(numbers)
        else:
            self._advance(next(phase for phase in _PHASES if phase == signature.phase), events)

    def _marks(self, signature: Signature, line: Line, events: list[Event]) -> None:
        """Stage markers. What was noted as an error before the first of them was no death."""
        if signature.use in ("fatal", "start-failed", "raised"):
            if not (self._fatal or self._start_failed or self._raised):
                self._errors.clear()
            if signature.use == "fatal":
                self._fatal = True
            elif signature.use == "start-failed":
                self._start_failed = self._start_failed or not self._fatal
            else:
                self._raised = True
            if self._marker is None and signature.use != "raised":
                self._marker = evidence(line)
            if line.tagged and line.role == "engine" and signature.use != "raised":
                events.append(FatalEvent(line.text[:200]))
        elif signature.use == "dead":
            self._dead = True

    def _candidate(self, signature: Signature, line: Line, numbers: dict[str, Number]) -> None:
        if signature.staged:
            holders(line.text, numbers)
        finding = Finding(line, signature.outcome, numbers, self._phase or "importing", self._frames.of(line.stream))
        if signature.use == "symptom":
            if line.tagged or line.level:
                self._symptom = self._symptom or finding
            else:  # a bare line of a serving engine says how it died, not that it did
                self._hint = self._hint or finding
        elif len(self._causes) < MAX_CAUSES:
            self._causes.setdefault(f"{signature.id} {line.process}", finding)

    def _error(self, line: Line) -> None:
        """Remember the first lines that look like an error, for a failure that nothing explains."""
        if line.role == "kernel" or (line.role == "api" and self._serving) or len(self._errors) >= MAX_ERRORS:
            return
        if self._serving and self._tagged and not line.tagged:
            return
        text = line.text
        shaped = _EXCEPTION.match(text) is not None
        record = (
            line.level in _FAILED_LEVELS and not text.startswith((" ", "Traceback", "File ")) and text.strip() != ""
        )
        if not shaped and not record:
            return
        found = evidence(line)
        if all(found.text != known.text for known in self._errors):
            self._errors.append(found)

    def _advance(self, phase: Phase, events: list[Event]) -> None:
        if self._phase is not None and _PHASES.index(phase) <= _PHASES.index(self._phase):
            return
        self._phase = phase
        events.append(PhaseEvent(phase))
        if phase == "serving":  # whatever was said before was survived
            self._serving = True
            self._causes.clear()
            self._errors.clear()
            self._symptom = self._hint = self._marker = None
            self._start_failed = self._fatal = self._raised = self._dead = False


def classify(
    lines: Iterable[bytes | str],
    *,
    exit_code: int | None = None,
    exit_signal: int | None = None,
    expected_stop: bool = False,
) -> Diagnosis:
    """The verdict on a whole output."""
    classifier = Classifier()
    for line in lines:
        classifier.feed(line.rstrip(b"\n") if isinstance(line, bytes) else line.rstrip("\n"))
    return classifier.verdict(exit_code=exit_code, exit_signal=exit_signal, expected_stop=expected_stop)
