"""``vllm-supervise diagnose``: say what a vLLM log means. No daemon, no configuration, nothing but the log.

Prints three to six lines, or with ``--json`` the object of docs/diagnosis.md. Exit status 0 whenever a verdict was
given; with ``--exit-code`` 10 if the verdict is a failure; 2 for a file that cannot be judged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from supervisord_vllm.core.diagnosis import Change, Diagnosis, Kind, Number
from supervisord_vllm.engine.classifier import Classifier
from supervisord_vllm.engine.lines import LIMIT
from supervisord_vllm.exitcodes import ExitCode

HEALTHY = (Kind.NONE, Kind.FALSE_ALARM)

_CHUNK = 1 << 16
_BINARY_LOOK = 8192


class UnreadableLogError(Exception):
    """The input cannot be judged; the message names it and says what to do."""


def diagnose(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="Log of one vLLM start, or - for standard input.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as one JSON object per file.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 10 if a failure was found.")] = False,
) -> None:
    """Say what a vLLM log means: the first cause, the evidence, and which flag to set to what."""
    found = faulty = False
    for name in files:
        try:
            verdict = diagnose_file(name)
        except UnreadableLogError as error:
            print(f"vllm-supervise diagnose: {error}", file=sys.stderr)
            faulty = True
            continue
        found = found or verdict.kind not in HEALTHY
        if as_json:
            _print(json.dumps(to_json(verdict) if len(files) == 1 else {"file": name, **to_json(verdict)}))
        else:
            _print(f"{name}:\n{to_text(verdict)}" if len(files) > 1 else to_text(verdict))
    if faulty:
        raise typer.Exit(ExitCode.USAGE)
    if exit_code and found:
        raise typer.Exit(ExitCode.FAILURE_FOUND)


def diagnose_file(name: str) -> Diagnosis:
    """The verdict on one file (``-`` is standard input). Raises `UnreadableLogError`."""
    if name == "-":
        return _judge(sys.stdin.buffer, "standard input")
    path = Path(name)
    try:
        with path.open("rb") as stream:
            return _judge(stream, name)
    except FileNotFoundError as error:
        raise UnreadableLogError(
            f"{name}: there is no such file; give the path of a vLLM log, or - for standard input"
        ) from error
    except IsADirectoryError as error:
        raise UnreadableLogError(f"{name} is a directory; give one log file in it") from error
    except PermissionError as error:
        raise UnreadableLogError(f"{name}: not readable for this user; run as its owner or root") from error
    except OSError as error:
        raise UnreadableLogError(f"{name}: {error.strerror or error}; give a readable vLLM log") from error


def _judge(stream: BinaryIO, name: str) -> Diagnosis:
    classifier = Classifier(kernel_lines=True)
    empty = True
    for line in bounded_lines(stream):
        if empty and b"\0" in line[:_BINARY_LOOK]:
            raise UnreadableLogError(
                f"{name} is a binary file; give the text that vLLM printed (unpack it first if it is compressed)"
            )
        empty = empty and not line.strip()
        classifier.feed(line)
    if empty:
        raise UnreadableLogError(f"{name} is empty; capture both outputs of vLLM (`vllm serve … > log 2>&1`)")
    return classifier.verdict()


def bounded_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a stream without their newlines, each cut at `LIMIT` bytes; memory is bounded whatever the file."""
    line = bytearray()
    while chunk := stream.read(_CHUNK):
        *complete, rest = chunk.split(b"\n")
        for part in complete:
            line += part[: LIMIT - len(line)]
            yield bytes(line)
            line.clear()
        line += rest[: LIMIT - len(line)]
    if line:
        yield bytes(line)


def to_json(verdict: Diagnosis) -> dict[str, Any]:
    """The public object, schema 1 (docs/diagnosis.md)."""
    return {
        "schema": 1,
        "kind": verdict.kind.value,
        "phase": verdict.phase,
        "action": verdict.action.value,
        "change": [{"lever": c.lever, "direction": c.direction, "to": c.to} for c in verdict.change],
        "target": verdict.target,
        "numbers": dict(verdict.numbers),
        "confidence": verdict.confidence,
        "evidence": [{"line": e.line, "role": e.role, "text": e.text} for e in verdict.evidence],
        "summary": verdict.summary,
        "advice": verdict.advice,
    }


def to_text(verdict: Diagnosis) -> str:
    """Three to six lines: what happened, the evidence, what to do, which flag to set to what."""
    lines = [f"{verdict.kind.value} ({verdict.phase}): {verdict.summary}"]
    lines += [
        f"  line {item.line}{f', {item.role}' if item.role else ''}: {_shortened(item.text)}"
        for item in verdict.evidence[:2]
    ]
    if verdict.advice:
        lines.append(f"  do: {verdict.advice}")
    settings = ", or ".join(_setting(change) for change in verdict.change[:3])
    if settings:
        lines.append(f"  set: {settings}")
    if verdict.numbers:
        shown = ", ".join(f"{name} {_number(value)}" for name, value in list(verdict.numbers.items())[:8])
        lines.append(f"  numbers: {shown}")
    target = f" ({verdict.target})" if verdict.target else ""
    lines.append(f"  action: {verdict.action.value}{target}, confidence {verdict.confidence:.2f}")
    if len(lines) > 6:
        lines = [line for line in lines if not line.startswith("  numbers: ")][:6]
    return "\n".join(lines)


def _print(text: str) -> None:
    """To standard output, whatever its encoding can show."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))


def _setting(change: Change) -> str:
    flag = change.lever if ":" in change.lever else "--" + change.lever.replace("_", "-")
    if change.to is not None:
        return f"{flag} {_number(change.to)}"
    return {"up": f"a higher {flag}", "down": f"a lower {flag}", "switch": f"another {flag}"}[change.direction]


def _number(value: Number) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shortened(text: str, width: int = 220) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
