"""An operator's verbs, each with a reason that goes into the history."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from supervisord_vllm.cli.daemon import DaemonError, NoDaemonError, ask, fail
from supervisord_vllm.cli.instance import ConfigOption, InstanceError, NameOption, StateDirOption, find
from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.redaction import printable


class Direction(str, Enum):
    """Which way a lever is moved."""

    UP = "up"
    DOWN = "down"


PATIENCE_S = 30.0
"""The daemon answers when it has taken the verb, not when an engine has started or stopped."""

Reason = Annotated[str, typer.Option("--reason", help="Why; it is kept in the history.")]


def start(
    reason: Reason = "", name: NameOption = None, config: ConfigOption = None, state_dir: StateDirOption = None
) -> None:
    """Start the engine, also after it was given up."""
    _command("start", reason, name, config, state_dir)


def stop(
    reason: Reason = "", name: NameOption = None, config: ConfigOption = None, state_dir: StateDirOption = None
) -> None:
    """Stop the engine; the daemon stays."""
    _command("stop", reason, name, config, state_dir)


def hold(
    reason: Reason = "", name: NameOption = None, config: ConfigOption = None, state_dir: StateDirOption = None
) -> None:
    """Change no configuration until ``resume``; restarts with the same one go on."""
    _command("hold", reason, name, config, state_dir)


def resume(
    reason: Reason = "", name: NameOption = None, config: ConfigOption = None, state_dir: StateDirOption = None
) -> None:
    """End a ``hold``."""
    _command("resume", reason, name, config, state_dir)


def restart(
    reason: Reason = "", name: NameOption = None, config: ConfigOption = None, state_dir: StateDirOption = None
) -> None:
    """End the engine and start it again with the same configuration."""
    _command("restart", reason, name, config, state_dir)


def drain(
    reason: Reason = "", name: NameOption = None, config: ConfigOption = None, state_dir: StateDirOption = None
) -> None:
    """Take no new requests, let the running ones finish, then stop the engine."""
    _command("drain", reason, name, config, state_dir)


def reset(
    reason: Reason = "", name: NameOption = None, config: ConfigOption = None, state_dir: StateDirOption = None
) -> None:
    """Forget failures, the budget and the last known good; an engine that was given up starts again."""
    _command("reset", reason, name, config, state_dir)


def step(
    lever: Annotated[str, typer.Argument(help="The lever, as in the ladder: max-num-seqs.")],
    direction: Annotated[Direction, typer.Argument(help="Which way.")],
    reason: Reason = "",
    name: NameOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Move one lever by one rung of the ladder, within its bounds, and go back if that fails."""
    more = {"lever": lever.replace("-", "_"), "direction": direction.value}
    _command("step", reason, name, config, state_dir, more)


def _command(
    verb: str,
    reason: str,
    name: NameOption,
    config: ConfigOption,
    state_dir: StateDirOption,
    more: dict[str, str] | None = None,
) -> None:
    try:
        instance = find(name, config, state_dir)
        answer = ask(instance.socket, "/command", {"verb": verb, "reason": reason, **(more or {})}, PATIENCE_S)
    except InstanceError as error:
        fail(str(error), error.code)
    except NoDaemonError as error:
        fail(f"{verb}: {error}; start one with vllm-supervise --config FILE", ExitCode.REFUSED)
    except DaemonError as error:
        fail(f"{verb}: {error}", ExitCode.REFUSED)
    print(printable(str(answer.get("message", "done"))))
