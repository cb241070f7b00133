"""From the evidence of a launch to its `Diagnosis`: one first cause, its numbers, and what to do.

Order (facts of vLLM 0.6-0.33): a named cause; else what died; else, where something failed, ``unknown`` with the first
error lines; else the exit; else the load; else nothing is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from string import Formatter

from supervisord_vllm.core.diagnosis import Action, Change, Diagnosis, Evidence, Kind, Number
from supervisord_vllm.core.facts import Phase
from supervisord_vllm.core.ledger import gib, to_bytes
from supervisord_vllm.engine.bounds import FORMULAS, bound
from supervisord_vllm.engine.lines import Line
from supervisord_vllm.engine.signature import Cure, Outcome

EVIDENCE_TEXT = 600
"""Characters of a line that are kept as evidence."""
SLIVER_GIB = 0.5
"""A shortfall smaller than one CUDA context: no neighbour gives just this back by leaving, so fitting is better."""

_DIGITS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_ARGPARSE_EXIT = 2


def evidence(line: Line) -> Evidence:
    """A line as evidence: bounded, without control characters."""
    return Evidence(line.number, line.process or line.role, _CONTROL.sub("?", line.text.strip())[:EVIDENCE_TEXT])


@dataclass(frozen=True)
class Finding:
    """One candidate: the line, its numbers and the verdict that it leads to (``None`` until the stage is known)."""

    line: Line
    outcome: Outcome | None
    numbers: dict[str, Number]
    phase: Phase
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """What is known of a launch when the verdict falls."""

    cause: Finding | None = None
    symptom: Finding | None = None
    errors: tuple[Evidence, ...] = ()
    marker: Evidence | None = None
    failed: bool = False
    serving: bool = False
    stopping: bool = False
    ledger: Mapping[str, Number] = field(default_factory=dict)
    load: tuple[Outcome, dict[str, Number]] | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    expected_stop: bool = False

    @property
    def exited(self) -> bool:
        """The engine ended although nobody of ours asked it to."""
        return not self.expected_stop and (self.exit_code is not None or self.exit_signal is not None)


def judge(record: Record) -> Diagnosis:
    """The verdict."""
    when = "runtime" if record.serving else "startup"
    if record.cause is not None:
        return _found(record, record.cause, when)
    if record.symptom is not None:
        return _found(record, record.symptom, when)
    if record.failed or (record.exited and not record.serving and record.errors):
        return _unknown(record, when)
    if record.exited:
        return _exit_alone(record, when)
    if record.load is not None:
        outcome, numbers = record.load
        return _diagnosis(outcome, numbers, {}, (), when)
    return Diagnosis(
        Kind.NONE,
        "shutdown" if record.stopping or record.expected_stop else when,
        Action.NO_ACTION,
        numbers=dict(record.ledger),
        confidence=0.9 if record.serving else 0.6,
        summary="Nothing in this log says that the engine failed.",
        signature="none",
    )


def _found(record: Record, finding: Finding, when: str) -> Diagnosis:
    lines = (evidence(finding.line), *((record.marker,) if record.marker is not None else ()))
    numbers = dict(finding.numbers)
    if record.exit_code is not None and "exit_code" not in numbers and finding is record.symptom:
        numbers["exit_code"] = record.exit_code
    if finding.outcome is None:
        raise ValueError("a finding without an outcome cannot be judged")
    return _diagnosis(finding.outcome, numbers, record.ledger, lines[: 1 if lines[0] == lines[-1] else 2], when)


def _unknown(record: Record, when: str) -> Diagnosis:
    if record.exit_code == _ARGPARSE_EXIT and not record.serving:
        outcome = Outcome(
            id="exit-argparse",
            kind=Kind.BAD_CONFIG,
            action=Action.STOP_EXPLAIN,
            summary=("vLLM ended with status 2, which is how it refuses its command line.",),
            advice=("Correct the flag that vLLM names.",),
            confidence=0.7,
        )
        return _diagnosis(outcome, {"exit_code": _ARGPARSE_EXIT}, {}, record.errors, when)
    first = record.errors[0].text if record.errors else (record.marker.text if record.marker is not None else "")
    lines = record.errors or ((record.marker,) if record.marker is not None else ())
    return Diagnosis(
        Kind.UNKNOWN,
        when,
        Action.RESTART_SAME,
        numbers=_exit_numbers(record),
        confidence=0.3,
        evidence=lines,
        summary=f"The engine failed and no known message explains it: {first[:200]}"
        if first
        else "The engine failed without a word.",
        advice="Start again once with the same flags; if it fails again, the lines above are what to search for.",
        signature="unknown:" + " ".join(_DIGITS.sub("#", first).split())[:160],
    )


def _exit_alone(record: Record, when: str) -> Diagnosis:
    """An unasked exit that no line explains. Exit 0 after serving is how vLLM ends after its engine died."""
    if record.exit_code not in (None, 0) and not record.serving and (record.exit_code or 0) < 128:
        return _unknown(record, when)
    how = f"signal {record.exit_signal}" if record.exit_signal is not None else f"status {record.exit_code}"
    outcome = Outcome(
        id="exit-unexplained",
        kind=Kind.ENGINE_DEAD,
        action=Action.RESTART_SAME,
        summary=(f"vLLM ended ({how}) although nobody asked it to, and its output does not say why.",),
        advice=("Start again with the same flags; look for an OOM kill in `dmesg` or the cgroup's memory.events.",),
        confidence=0.6,
    )
    return _diagnosis(outcome, _exit_numbers(record), {}, (), when)


def _exit_numbers(record: Record) -> dict[str, Number]:
    numbers: dict[str, Number] = {}
    if record.exit_code is not None:
        numbers["exit_code"] = record.exit_code
    if record.exit_signal is not None:
        numbers["signal"] = record.exit_signal
    return numbers


def _diagnosis(
    outcome: Outcome,
    printed: Mapping[str, Number],
    ledger: Mapping[str, Number],
    lines: Iterable[Evidence],
    when: str,
) -> Diagnosis:
    numbers = {name: ledger[name] for name in outcome.context if name in ledger} | dict(printed)
    known = _derived({**{name: value for name, value in ledger.items() if name != "free_gib"}, **numbers})
    if "shortfall_gib" in known and outcome.kind is Kind.GPU_BUSY_FOREIGN:
        numbers["shortfall_gib"] = known["shortfall_gib"]
    for formula in FORMULAS:
        value = bound(formula, known)
        if value is not None:
            known[formula] = value
    changes = tuple(_change(cure, known) for cure in outcome.cures)
    return Diagnosis(
        kind=outcome.kind,
        phase=when,
        action=_action(outcome, known),
        change=changes,
        target=outcome.target,
        numbers=numbers,
        confidence=outcome.confidence,
        evidence=tuple(lines),
        summary=render(outcome.summary, known),
        advice=render(outcome.advice, known),
        signature=outcome.id,
    )


def _action(outcome: Outcome, known: Mapping[str, Number]) -> Action:
    """The table's action; a neighbour that is in the way by a sliver is fitted beside instead of waited for."""
    short = known.get("shortfall_gib")
    if outcome.action is Action.WAIT_VRAM and "fit_free" in known and isinstance(short, float) and short <= SLIVER_GIB:
        return Action.NEXT_CONFIG
    return outcome.action


def _change(cure: Cure, known: Mapping[str, Number]) -> Change:
    if cure.to is None:
        return Change(cure.lever, cure.direction)
    if cure.to.startswith("="):
        return Change(cure.lever, cure.direction, cure.to[1:])
    return Change(cure.lever, cure.direction, bound(cure.to, known))


def _derived(known: dict[str, Number]) -> dict[str, Number]:
    """Numbers that sentences want and messages do not print, two decimals like the ones they come from."""

    def size(name: str) -> float | None:
        value = known.get(name)
        return float(value) if isinstance(value, (int, float)) else None

    requested, free = size("requested_gib"), size("free_gib")
    if requested is not None and free is not None:
        known["shortfall_gib"] = round(requested - free, 2)
    available, needed = size("available_kv_gib"), size("needed_kv_gib")
    if available is not None and available < 0:
        known["kv_deficit_gib"] = -available
    if available and needed:
        known["kv_shortfall_gib"] = round(needed - available, 2)
    return known


def render(templates: Iterable[str], known: Mapping[str, Number]) -> str:
    """The first template whose numbers are all known; empty where none is. The format ``size`` turns GiB into the unit
    that reads best; what is no number is shown as text.
    """
    for template in templates:
        parts = list(Formatter().parse(template))
        if any(name is not None and name not in known for _, name, _, _ in parts):
            continue
        text = []
        for literal, name, spec, _ in parts:
            text.append(literal)
            if name is not None:
                text.append(_shown(known[name], spec or ""))
        return "".join(text)
    return ""


def _shown(value: Number, spec: str) -> str:
    if not isinstance(value, (int, float)):
        return value
    return gib(to_bytes(value)) if spec == "size" else format(value, spec)
