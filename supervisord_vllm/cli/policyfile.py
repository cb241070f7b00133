"""The options that name a policy, and its settings or the end of the command with exit 78."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.host.systemd import to_journal, with_priority

if TYPE_CHECKING:
    from supervisord_vllm.config import Settings

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="The policy file.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, such as engine.port=8001; may be repeated."),
]


def settings_of(config: Path, assignments: list[str] | None = None, *, as_json: bool = False) -> Settings:
    """Load a policy; a bad one is said on stderr (with ``as_json`` as an object on stdout) and ends the command with
    78.
    """
    from supervisord_vllm.config import ConfigError, load

    flags: dict[str, object] = {}
    for assignment in assignments or ():
        key, equals, value = assignment.partition("=")
        if not equals:
            raise typer.BadParameter(f"{assignment!r} is no KEY=VALUE", param_hint="--set")
        flags[key] = value
    try:
        return load(config, environ=os.environ, flags=flags)
    except ConfigError as error:
        refuse(error.problems, as_json=as_json)


def refuse(problems: tuple[str, ...], *, as_json: bool = False) -> NoReturn:
    """Say what is wrong with a policy, one line each, and end the command with 78."""
    if as_json:
        print(json.dumps({"schema": 1, "ok": False, "problems": list(problems)}, indent=2))
    else:
        journal = to_journal(2, os.environ)
        for problem in problems:
            print(with_priority(problem, "error") if journal else problem, file=sys.stderr)
    raise typer.Exit(ExitCode.CONFIGURATION)
