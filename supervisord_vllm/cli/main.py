"""The command ``vllm-supervise``: its verbs, each imported when it runs.

Start-up is light: this module imports typer and the standard library only, and the list of verbs in ``--help`` is made
without importing any of them. Options without a verb mean ``run``: ``vllm-supervise --config F``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from supervisord_vllm import __version__

PROGRAM = "vllm-supervise"


class Verb(NamedTuple):
    """Where a verb's function is, and its line in ``--help``."""

    module: str
    help: str


_CLI = "supervisord_vllm.cli"
VERBS: dict[str, Verb] = {
    "run": Verb(f"{_CLI}.run", "Supervise the engine; default with --config."),
    "check": Verb(f"{_CLI}.check", "Validate a policy file and show what it means."),
    "preflight": Verb(f"{_CLI}.preflight", "Judge this machine before a launch."),
    "status": Verb(f"{_CLI}.status", "Say what the engine does, why, and what is next."),
    "history": Verb(f"{_CLI}.history", "List launches, failures and decisions."),
    "explain": Verb(f"{_CLI}.history", "Explain a decision: evidence and arithmetic."),
    "logs": Verb(f"{_CLI}.logs", "Print what the engine printed; needs no daemon."),
    "rehearse": Verb(f"{_CLI}.rehearse", "Run a policy against a simulated GPU in virtual time."),
    "diagnose": Verb(f"{_CLI}.diagnose", "Say what a vLLM log means; needs no daemon."),
    "signatures": Verb(f"{_CLI}.signatures", "Check the known messages against a vLLM's source."),
    "start": Verb(f"{_CLI}.control", "Start the engine."),
    "stop": Verb(f"{_CLI}.control", "Stop the engine; the daemon stays."),
    "reap": Verb(f"{_CLI}.reap", "End what an earlier daemon left; needs no daemon."),
    "hold": Verb(f"{_CLI}.control", "Keep the configuration as it is."),
    "restart": Verb(f"{_CLI}.control", "End the engine and start it again as it is."),
    "upgrade": Verb(f"{_CLI}.control", "Replace the daemon; the engine goes on."),
    "drain": Verb(f"{_CLI}.control", "Let requests finish, then stop the engine."),
    "reset": Verb(f"{_CLI}.control", "Forget failures and budget; begin afresh."),
    "step": Verb(f"{_CLI}.control", "Move one lever by one rung."),
    "resume": Verb(f"{_CLI}.control", "End a hold."),
}

_OWN_OPTIONS = frozenset({"--help", "--version", "--install-completion", "--show-completion"})


class Verbs(TyperGroup):
    """The group of verbs: stubs for the list in ``--help``, the real command once a verb is called."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  # click's context, of either click
        """Take options without a verb for those of ``run``."""
        if args and args[0].startswith("-") and args[0].partition("=")[0] not in _OWN_OPTIONS:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        """Exchange the stub for the verb itself."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, _command(name) if name in VERBS else command, rest


def _command(name: str) -> Any:  # noqa: ANN401  # a click command, of either click
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    function: Callable[..., Any] = getattr(import_module(VERBS[name].module), name)
    single.command(name, help=function.__doc__ or VERBS[name].help)(function)
    return typer.main.get_command(single)


app = typer.Typer(
    name=PROGRAM,
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A supervisor for vLLM: runs it, says what went wrong, and restarts it with a configuration that fits.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass


def _stub() -> None:
    """Stand in the list of verbs; `Verbs.resolve_command` exchanges it."""


for _name, _verb in VERBS.items():
    app.command(_name, help=_verb.help)(_stub)


def main() -> None:
    """Run the command line; ends the process with one of `ExitCode`."""
    try:
        app(prog_name=PROGRAM)
    except BrokenPipeError:  # the reader of our output has gone, as in `vllm-supervise history | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
