"""``vllm-supervise signatures verify``: which messages a release of vLLM no longer prints.

Exit status 0 whenever the folder could be read; with ``--exit-code`` 10 if a message is gone that should be there; 2
for a folder without vLLM.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from supervisord_vllm.engine.drift import NoVllmError, Report, verify
from supervisord_vllm.engine.signature import outside_verified, verified_range
from supervisord_vllm.exitcodes import ExitCode


def signatures(
    task: Annotated[str, typer.Argument(metavar="verify", help="What to do; there is one task.")],
    vllm: Annotated[Path, typer.Option("--vllm", metavar="DIR", help="The vllm package, or the folder it lies in.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 10 if a message is unexpectedly gone.")
    ] = False,
) -> None:
    """Check every signature's text against the source of an installed vLLM."""
    if task != "verify":
        raise typer.BadParameter(f"{task!r} is no task; say `vllm-supervise signatures verify --vllm DIR`")
    try:
        report = verify(vllm)
    except NoVllmError as error:
        print(f"vllm-supervise signatures: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.USAGE) from error
    print(json.dumps(to_json(report), indent=2) if as_json else to_text(report))
    if exit_code and report.unexpected:
        raise typer.Exit(ExitCode.FAILURE_FOUND)


def to_json(report: Report) -> dict[str, object]:
    """The public object, schema 1."""
    return {
        "schema": 1,
        "version": report.version,
        "verified": list(verified_range()),
        "checked": report.checked,
        "gone": [
            {
                "id": gone.signature.id,
                "literals": list(gone.missing),
                "seen": gone.signature.seen,
                "source": gone.signature.source,
                "expected": gone.expected,
            }
            for gone in report.gone
        ],
    }


def to_text(report: Report) -> str:
    """A line per message that is gone, those that should be there first."""
    there = report.checked - len(report.gone)
    lines = [f"vLLM {report.version}: {there} of {report.checked} messages are in its source."]
    outside = outside_verified(report.version)
    if outside is not None:
        lines.append(outside)
    if report.unexpected:
        lines.append("Gone, although they were seen in this range:")
        lines += [f"  {gone.signature.id} ({gone.signature.seen}): {gone.missing[0]!r}" for gone in report.unexpected]
    rest = [gone.signature.id for gone in report.gone if not gone.expected]
    if rest:
        lines.append(f"Not of this release, as their ranges say: {', '.join(rest)}")
    return "\n".join(lines)
