"""The classifier: an engine's output, line by line, to events at once and to one `Diagnosis` in the end.

Used live by the daemon and on files by ``vllm-supervise diagnose``; both give the same verdict for the same lines.

Contract: `Classifier.feed` never raises, whatever the bytes; time is linear in the line and memory is bounded
(candidate lines, the first error lines, the latest tracebacks, the last load lines and one record per kind of note are
kept, never the log). Text names a kind, it never proves that an engine failed: a running engine whose log quotes an
error gets ``none``. What makes a line evidence:

* who wrote it: engine processes, or untagged exceptions and records; what the API server logs once it serves may quote
  prompts and is never a cause. Where the engine's lines are tagged, an untagged line found while serving is no cause;
* its level: an INFO line is never a cause;
* its place: what came before "Application startup complete." was survived; what comes after the first stop signal
  (ours, see `Classifier.cut`, or the server's own notice of one) is shutdown noise;
* the first of all causes wins; covers, repetitions and after-shocks are skipped, in whatever order they arrive.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from supervisord_vllm.core.diagnosis import Diagnosis, Evidence, Number
from supervisord_vllm.engine.circumstance import Outside, Situation, Told, first, told_exit
from supervisord_vllm.engine.events import Event, FatalEvent, LedgerEvent, PhaseEvent
from supervisord_vllm.engine.frames import Frames, has
from supervisord_vllm.engine.judgement import Finding, Record, diagnosis, evidence, judge, known_numbers
from supervisord_vllm.engine.lines import LIMIT, Line, parse, segments
from supervisord_vllm.engine.notes import Notes
from supervisord_vllm.engine.oom import holders, outcome
from supervisord_vllm.engine.ordinary import LOAD_MARK, Ordinary, by_server
from supervisord_vllm.engine.signature import Catalogue, Signature, catalogue
from supervisord_vllm.engine.stats import WINDOW, Load

if TYPE_CHECKING:
    from supervisord_vllm.core.facts import Phase

__all__ = ["Classifier", "Event", "FatalEvent", "LedgerEvent", "Outside", "PhaseEvent", "classify"]

MAX_CAUSES: Final = 32
MAX_ERRORS: Final = 5
MAX_WRITERS: Final = 4096
LOAD_LINE: Final = 2048
"""Bytes of a load line that are kept until a verdict is asked for."""

_PHASES: Final[tuple[Phase, ...]] = ("importing", "weights", "compiling", "profiling", "capturing", "serving")
_MARKED: Final = re.compile(r'rror|xception|CRITICAL|ERROR|Traceback|File "|"levelname"|\{"log":')
"""Together with the anchors: what a line must contain to be looked at closer."""
_EXCEPTION: Final = re.compile(
    r"(?:[\w.]{1,120}\.)?[A-Z]\w{0,80}(?:Error|Exception|Exit|Interrupt)(?::|\(|$)|(?:Exception|AssertionError): "
)
_FAILED_LEVELS: Final = ("ERROR", "CRITICAL")
_SERVERS_OWN_WORD: Final = (
    "core_client.py",
    "async_llm.py",
    "launcher.py",
    "client.py",
    "async_llm_engine.py",
    "multiproc_worker_utils.py",
    "uvicorn",
)
"""Files in which a server speaks of its engine (or uvicorn of its socket); its other records may quote requests."""
_TELLING: Final = ("cause", "symptom", "fatal", "start-failed", "died", "raised", "dead")
_SERVER_LOOP: Final = ("async_llm.py", "v1/engine/async_llm.py")
_EXTERNAL_CACHE: Final = b"External prefix cache"
_OF_THE_START: Final = ("note-shm-wait", "note-hub-lock", "note-jit-baton", "note-placement-group", "ledger-shards")


@lru_cache(maxsize=1)
def _shipped() -> tuple[Catalogue, Ordinary]:
    signatures = catalogue()
    return signatures, Ordinary.but_for(signatures.told_at_info)


class Classifier:
    """One launch's output. Feed lines in order; ask for the verdict when the output ended (or at any time).

    ``kernel_lines``: believe lines of the kernel log, the service manager and the like, which a journal or a pasted
    report may hold and an engine's own output never does. ``number`` is the number of the line before the first.
    """

    def __init__(self, signatures: Catalogue | None = None, *, kernel_lines: bool = False, number: int = 0) -> None:
        if signatures is None:
            self._catalogue, self._ordinary = _shipped()
        else:
            self._catalogue, self._ordinary = signatures, Ordinary.but_for(signatures.told_at_info)
        self._kernel_lines = kernel_lines
        self._number = number
        self._phase: Phase | None = None
        self._serving = False
        self._tagged = False
        self._cut = False
        self._stopping = False
        self._fatal = self._start_failed = self._raised = False
        self._dead: Evidence | None = None
        self._marker: Evidence | None = None
        self._causes: dict[str, Finding] = {}
        self._symptom: Finding | None = None
        self._hint: Finding | None = None
        self._errors: list[tuple[Evidence, tuple[str, ...]]] = []
        self._ledger: dict[str, Number] = {}
        self._frames = Frames()
        self._loads: deque[tuple[int, bytes | str]] = deque(maxlen=WINDOW)
        self._notes = Notes()
        self._raw = ""
        self._writers: set[str] = set()
        self._servers: set[str] = set()

    @property
    def ledger(self) -> dict[str, Number]:
        """A copy of the numbers seen so far, the later ones in place of the earlier."""
        return dict(self._ledger)

    @property
    def line(self) -> int:
        """The number of the last line that was fed."""
        return self._number

    @property
    def phase(self) -> Phase | None:
        """How far the start has come, ``None`` before the first line."""
        return self._phase

    def feed(self, line: bytes | str) -> list[Event]:
        """Take one raw line without its newline; the events that it is worth, in order."""
        return [] if self.passed(line) else self.look(line)

    def passed(self, line: bytes | str) -> bool:
        """Whether the line is an ordinary one, which is hereby dealt with; else it is left for `look`."""
        if self._phase is None:
            return False
        if isinstance(line, bytes):
            raw = self._ordinary.raw.match(line)
            if raw is None or b"\r" in line:
                return False
            process, load = raw[1] and raw[1].decode(), raw[2] is not None
        else:
            text = self._ordinary.text.match(line)
            if text is None or "\r" in line:
                return False
            process, load = text[1], text[2] is not None
        if process and not self._serving:  # who writes before anything is served is known to be an engine's process
            return False
        if process and not self._tagged and not by_server(process):
            self._tagged = True
        if load:
            if not self._serving or (process and not by_server(process)):
                return False
            if not (self._cut or self._stopping):
                self._loads.append((self._number + 1, line[:LOAD_LINE]))
        self._number += 1
        return True

    def passed_run(self, block: bytes, at: int) -> int:
        """Deal with the ordinary lines of the server that stand at this place of a block of whole lines; the place
        behind them, the same one where there are none. Only once the engine serves.
        """
        if not self._serving:
            return at
        run = self._ordinary.run.match(block, at)
        if run is None:
            return at
        end = run.end()
        if not (self._cut or self._stopping):
            begins: list[int] = []
            place = block.rfind(LOAD_MARK, at, end)
            while place >= 0 and len(begins) < WINDOW:
                begins.append(block.rfind(b"\n", at, place) + 1 or at)
                place = block.rfind(LOAD_MARK, at, begins[-1])
            number, before = self._number + 1, at
            for begin in reversed(begins):
                number += block.count(b"\n", before, begin)
                before = begin
                self._loads.append((number, block[begin : min(block.find(b"\n", begin), begin + LOAD_LINE)]))
        self._number += block.count(b"\n", at, end)
        return end

    def look(self, line: bytes | str) -> list[Event]:
        """Take one raw line that is not ordinary."""
        self._number += 1
        events: list[Event] = []
        if self._phase is None:
            self._advance("importing", events)
        for text in segments(line[:LIMIT]):
            anchored = self._catalogue.anchored(text)
            if anchored or _MARKED.search(text):
                escaped = '{"' in text
                self._raw = text
                for parsed in parse(text, self._number):
                    self._line(parsed, events, None if escaped else anchored)
        return events

    def cut(self) -> None:
        """Our own first stop signal was sent: nothing from here on can be a cause."""
        self._cut = True

    def verdict(
        self,
        *,
        exit_code: int | None = None,
        exit_signal: int | None = None,
        expected_stop: bool = False,
        outside: Outside | None = None,
        earlier: tuple[Diagnosis, ...] = (),
    ) -> Diagnosis:
        """The first cause of what happened. ``expected_stop``: the exit, if any, is one that we asked for. ``outside``:
        what is known beside the output. ``earlier``: the verdicts on the launches before this one.
        """
        told = Told(exit_code, exit_signal)
        if exit_code is None and exit_signal is None:
            told = told_exit(self._notes)
            expected_stop = expected_stop or self._stopping
        died = self._fatal or self._dead is not None or self._start_failed or self._symptom is not None
        died = died or (self._hint is not None and not self._serving)
        exited = not expected_stop and (told.exit_code is not None or told.exit_signal is not None)
        load, external = self._load()
        record = Record(
            cause=self._first_cause(failed=died or exited, proven=self._fatal or self._start_failed or exited),
            symptom=None
            if self._raised and self._errors
            else (self._hint or self._symptom)
            if died or exited
            else None,
            errors=tuple(error for error, _ in self._errors),
            frames=self._errors[0][1] if self._errors else (),
            marker=self._marker,
            failed=died or (not self._serving and bool(self._errors)),
            serving=self._runtime,
            stopping=self._stopping,
            ledger=self._ledger,
            load=load.judge(),
            last_load=load.last,
            dead=self._dead,
            exit_code=told.exit_code,
            exit_signal=told.exit_signal,
            expected_stop=expected_stop,
        )
        found = judge(record)
        return self._in_circumstances(
            found,
            outside or Outside(),
            record,
            replace_external=external,
            stalled=load.stalled,
            earlier=earlier,
        )

    def _in_circumstances(
        self,
        found: Diagnosis,
        outside: Outside,
        record: Record,
        *,
        replace_external: bool,
        stalled: int,
        earlier: tuple[Diagnosis, ...],
    ) -> Diagnosis:
        """The verdict as what stands beside the text changes it."""
        notes = self._notes
        if outside.kernel:
            notes = deepcopy(notes)
            self._read_kernel(outside.kernel, notes)
        situation = Situation(
            found,
            notes,
            outside,
            known_numbers(found.numbers, self._ledger),
            phase=self._phase,
            failed=record.failed or record.cause is not None,
            serving=record.serving,
            external_cache=replace_external or "note-external-cache" in notes,
            stalled=stalled,
            exit_signal=record.exit_signal,
            exit_code=record.exit_code,
            earlier=earlier,
        )
        rule = first(situation)
        if rule is None:
            return found
        lines = [note.evidence for note in (notes[identity] for identity in rule.proof) if note is not None]
        numbers = dict(found.numbers) | dict(rule.implies)
        for identity in rule.proof:
            note = notes[identity]
            numbers.update(
                {name: value for name, value in (note.last if note else {}).items() if name not in ("pid", "victim")}
            )
        changed = diagnosis(
            rule.outcome,
            numbers,
            self._ledger,
            (*found.evidence[:1], *lines, *found.evidence[1:]),
            rule.phase or found.phase,
        )
        return replace(changed, kind=found.kind, signature=found.signature) if rule.keep else changed

    def _read_kernel(self, lines: tuple[str, ...], notes: Notes) -> None:
        """Kernel log lines that came from outside of the output."""
        for raw in lines:
            for text in segments(raw):
                for line in parse(text, 0):
                    for signature, numbers in self._catalogue.matches(line.text):
                        if signature.use == "note" and signature.beside:
                            notes.add(signature.id, replace(evidence(line), role="kernel"), numbers)

    def _load(self) -> tuple[Load, bool]:
        """The load lines of the window, read now, and whether they show a cache outside of the GPU."""
        load, external = Load(), False
        for number, raw in self._loads:
            blob = raw if isinstance(raw, bytes) else raw.encode("utf-8", "replace")
            external = external or _EXTERNAL_CACHE in blob
            for text in segments(raw):
                for line in parse(text, number):
                    for signature, numbers in self._catalogue.matches(line.text):
                        if signature.use == "stats":
                            load.feed(numbers, evidence(line))
        return load, external

    @property
    def _runtime(self) -> bool:
        return not self._start_failed and (self._serving or self._fatal or self._dead is not None)

    def _first_cause(self, *, failed: bool, proven: bool) -> Finding | None:
        """The first cause; a tagged one where the engine tags its lines, since what is untagged can be quoted."""
        causes = [
            finding for finding in self._causes.values() if self._admissible(finding, failed=failed, proven=proven)
        ]
        if not causes:
            return None
        tagged = [finding for finding in causes if finding.line.tagged and finding.line.role == "engine"]
        cause = (tagged or causes)[0]
        if cause.outcome is not None:
            return cause
        numbers = dict(cause.numbers)
        verdict = outcome(self._catalogue, cause.frames, cause.phase, numbers, serving=self._runtime)
        return Finding(cause.line, verdict, numbers, cause.phase, cause.frames)

    def _admissible(self, finding: Finding, *, failed: bool, proven: bool) -> bool:
        """Whether a candidate may be the cause. While serving, an untagged line proves nothing by itself; where the
        engine tags its lines, only its own word or an exit proves that it failed, not what its server says.
        """
        line = finding.line
        if line.tagged or line.source == "uvicorn" or not self._serving or finding.alone:
            return True
        return proven if self._tagged else failed

    def _line(self, line: Line, events: list[Event], anchored: list[tuple[Signature, ...]] | None) -> None:
        if line.role == "api" or (line.tagged and line.role == "engine"):
            line = self._believed(line)
        framed = self._frames.feed(line.stream, line.text)
        hits = [hit for hit in self._catalogue.matches(line.text, anchored) if self._is_from(hit[0], line)]
        wrapper = False
        printed: dict[str, Number] = {}
        for signature, numbers in hits:
            if signature.use == "wrapper":
                wrapper = True
            elif signature.use == "ledger":
                printed.update(numbers)
                if signature.id in _OF_THE_START:
                    self._notes.add(signature.id, evidence(line), numbers)
            elif signature.use in ("phase", "stats"):
                self._progress(signature, line, events)
            elif signature.use == "note":
                self._note(signature, line, numbers)
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
            if signature.use in ("cause", "symptom") and self._candidate(signature, line, numbers):
                return
        if not framed and not any(signature.use not in ("ledger", "note") for signature, _ in hits):
            self._error(line)

    def _believed(self, line: Line) -> Line:
        """A process's line as it is; as one that proves nothing by itself where none of that name and number wrote
        before anything was served: a request can bring a newline and a tag of its own into the log. Such a line still
        names the cause if somebody else says that the engine failed.
        """
        known = self._servers if line.role == "api" else self._writers
        if self._serving and known and line.stream not in known and line.source != "uvicorn":
            quiet = "" if line.level in _FAILED_LEVELS else line.level
            return replace(line, tagged=False, level=quiet, source="")
        if not line.tagged:
            return line
        self._tagged = self._tagged or line.role == "engine"
        if not self._serving and len(known) < MAX_WRITERS:
            known.add(line.stream)
        return line

    def _note(self, signature: Signature, line: Line, numbers: dict[str, Number]) -> None:
        """A note counts until our own stop; how a stop went is only to be read in what lies beside the output."""
        if signature.beside or not (self._cut or self._stopping):
            self._notes.add(signature.id, evidence(line), numbers)

    @property
    def _failing(self) -> bool:
        ended = self._fatal or self._start_failed or self._dead is not None
        return ended or self._symptom is not None or bool(self._causes)

    def _is_from(self, signature: Signature, line: Line) -> bool:
        """Whether the line's writer and level are ones that this signature may be believed from."""
        if signature.level == "error" and line.level not in ("", *_FAILED_LEVELS):
            return False
        names_kind = signature.use in ("cause", "symptom")
        if names_kind and not (line.tagged or line.level or signature.bare or _EXCEPTION.match(line.text)):
            return False
        if not self._kernel_lines and (line.role in ("kernel", "systemd") or signature.beside):
            return False
        if signature.beside:
            return not line.tagged
        if line.role in ("kernel", "systemd"):
            return False
        if signature.role == "startup" or signature.use == "ledger":
            return not self._serving
        if signature.role == "server":
            return line.role in ("api", "")
        if signature.role == "engine":
            return line.role in ("engine", "") and not self._quotable(signature, line)
        if line.role == "api":
            own_word = line.source.rpartition("/")[2] in _SERVERS_OWN_WORD
            return own_word or not (self._serving and signature.use in _TELLING)
        return not self._quotable(signature, line)

    def _quotable(self, signature: Signature, line: Line) -> bool:
        """An untagged line of a serving engine that tags its own: a traceback that may quote what a client sent."""
        return (
            signature.use in ("cause", "fatal", "start-failed", "died", "raised", "dead")
            and self._serving
            and self._tagged
            and not line.tagged
            and line.role == ""
        )

    def _progress(self, signature: Signature, line: Line, events: list[Event]) -> None:
        if signature.use == "stats":
            self._advance("serving", events)
            if not (self._cut or self._stopping):
                self._loads.append((line.number, self._raw[:LOAD_LINE]))
        else:
            self._advance(next(phase for phase in _PHASES if phase == signature.phase), events)

    def _marks(self, signature: Signature, line: Line, events: list[Event]) -> None:
        """Stage markers. What was noted as an error before the first of them was no death."""
        if signature.use in ("fatal", "start-failed", "died", "raised"):
            if line.process and not line.tagged:
                return
            if line.role == "api" and self._serving and self._tagged:
                return  # a tagged engine says itself that it dies, or its exit does
            if not (self._fatal or self._start_failed or self._raised):
                self._errors.clear()
            if signature.use == "fatal" or (signature.use == "died" and self._serving):
                self._fatal = True
            elif signature.use in ("start-failed", "died"):
                self._start_failed = self._start_failed or not self._fatal
            else:
                self._raised = True
            if self._marker is None and signature.use != "raised":
                self._marker = evidence(line)
            if line.tagged and line.role == "engine" and signature.use != "raised":
                events.append(FatalEvent(line.text[:200]))
        elif signature.use == "dead":
            self._dead = self._dead or evidence(line)

    def _candidate(self, signature: Signature, line: Line, numbers: dict[str, Number]) -> bool:
        """Take a line as a possible cause or symptom; false if its traceback is not the one that the message needs."""
        frames = self._frames.of(line.stream)
        if signature.frames and not has(frames, signature.frames):
            return False
        if signature.staged:
            holders(line.text, numbers)
        finding = Finding(line, signature.outcome, numbers, self._phase or "importing", frames, alone=signature.alone)
        if signature.use == "symptom":
            if line.tagged or line.level:
                self._symptom = self._symptom or finding
            else:  # a bare line of a serving engine says how it died, not that it did
                self._hint = self._hint or finding
        elif len(self._causes) < MAX_CAUSES:
            self._causes.setdefault(f"{signature.id} {line.process}", finding)
        return True

    def _error(self, line: Line) -> None:
        """Remember the first lines that look like an error, for a failure that nothing explains."""
        if line.role in ("kernel", "systemd") or len(self._errors) >= MAX_ERRORS:
            return
        if line.role == "api" and self._serving and not (self._dead is not None and line.source in _SERVER_LOOP):
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
        if all(found.text != known.text for known, _ in self._errors):
            self._errors.append((found, self._frames.of(line.stream)))

    def _advance(self, phase: Phase, events: list[Event]) -> None:
        if self._phase is not None and _PHASES.index(phase) <= _PHASES.index(self._phase):
            return
        self._phase = phase
        events.append(PhaseEvent(phase))
        if phase == "serving":  # whatever was said before was survived
            self._serving = True
            self._causes.clear()
            self._errors.clear()
            self._symptom = self._hint = self._marker = self._dead = None
            self._start_failed = self._fatal = self._raised = False
            self._notes.forget(*_OF_THE_START)


def classify(
    lines: Iterable[bytes | str],
    *,
    exit_code: int | None = None,
    exit_signal: int | None = None,
    expected_stop: bool = False,
    outside: Outside | None = None,
) -> Diagnosis:
    """The verdict on a whole output."""
    classifier = Classifier()
    for line in lines:
        classifier.feed(line.rstrip(b"\n") if isinstance(line, bytes) else line.rstrip("\n"))
    return classifier.verdict(
        exit_code=exit_code, exit_signal=exit_signal, expected_stop=expected_stop, outside=outside
    )
