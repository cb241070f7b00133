"""``vllm-supervise diagnose``: say what a vLLM log means. No daemon, no configuration, nothing but the log.

Prints three to six lines, or with ``--json`` the object of docs/diagnosis.md. With ``--config`` also what that policy
would do (only then is pydantic imported). Exit status 0 whenever a verdict was given; with ``--exit-code`` 10 if a
verdict is a failure; 2 for a file that cannot be judged; 78 for a policy that is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisord_vllm.cli.verdict import (
    HEALTHY,
    chosen,
    earlier_to_json,
    earlier_to_text,
    policy_to_json,
    to_json,
    to_text,
)
from supervisord_vllm.core.diagnosis import Diagnosis
from supervisord_vllm.engine.launches import Launches
from supervisord_vllm.engine.logfile import UnreadableLogError, bounded_lines, followed, judged
from supervisord_vllm.exitcodes import ExitCode

if TYPE_CHECKING:
    from supervisord_vllm.config import Settings

__all__ = ["bounded_lines", "diagnose"]


def diagnose(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE…", help="Logs of vLLM (the last start in each counts), or - for standard input."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as one JSON object per file.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 10 if a failure was found.")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="Also say what this policy would do.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay with one growing file and print each new verdict.")
    ] = False,
) -> None:
    """Say what a vLLM log means: the first cause, the evidence, and which flag to set to what."""
    settings = _settings(config, as_json=as_json)
    if follow:
        _follow(files, settings, as_json=as_json)
        return
    found = faulty = False
    for name in files:
        try:
            launches = judged(name)
        except UnreadableLogError as error:
            print(f"vllm-supervise diagnose: {error}", file=sys.stderr)
            faulty = True
            continue
        verdict = launches.verdict()
        found = found or verdict.kind not in HEALTHY
        _print(_told(verdict, launches, settings, name if len(files) > 1 else None, as_json=as_json))
    if faulty:
        raise typer.Exit(ExitCode.USAGE)
    if exit_code and found:
        raise typer.Exit(ExitCode.FAILURE_FOUND)


def _settings(config: Path | None, *, as_json: bool) -> Settings | None:
    if config is None:
        return None
    from supervisord_vllm.cli.policyfile import settings_of

    return settings_of(config, as_json=as_json)


def _follow(files: list[str], settings: Settings | None, *, as_json: bool) -> None:
    """Verdicts on one growing file, each once, until the terminal or the reader ends it."""
    if len(files) != 1 or files[0] == "-":
        raise typer.BadParameter("--follow wants one file that grows (a pipe is read to its end without it)")
    said: tuple[object, ...] = ()
    try:
        for launches in followed(files[0]):
            verdict = launches.verdict()
            first = verdict.evidence[0].line if verdict.evidence else 0
            now = (verdict.kind, verdict.signature, first, len(launches.earlier))
            if now != said:
                said = now
                _print(_told(verdict, launches, settings, None, as_json=as_json))
                sys.stdout.flush()
    except UnreadableLogError as error:
        print(f"vllm-supervise diagnose: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.USAGE) from error
    except KeyboardInterrupt:
        return


def _told(verdict: Diagnosis, launches: Launches, settings: Settings | None, name: str | None, *, as_json: bool) -> str:
    choice = chosen(settings.policy, launches, verdict) if settings is not None else None
    earlier = launches.earlier
    if as_json:
        shown: dict[str, Any] = {} if name is None else {"file": name}
        shown.update(to_json(verdict))
        if earlier:
            shown["earlier"] = earlier_to_json(earlier)
        if settings is not None and choice is not None:
            shown["policy"] = policy_to_json(settings.name, choice)
            shown["action"] = choice.action.value
            if choice.moves:
                shown["change"] = [
                    {"lever": move["lever"], "direction": move["direction"], "to": move["to"]}
                    for move in shown["policy"]["moves"]
                ]
        return json.dumps(shown)
    text = to_text(verdict, choice)
    if earlier:
        text += "\n" + earlier_to_text(earlier)
    return text if name is None else f"{name}:\n{text}"


def _print(text: str) -> None:
    """To standard output, whatever its encoding can show."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))
