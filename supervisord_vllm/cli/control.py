"""An operator's verbs, each with a reason that goes into the history."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from supervisord_vllm.cli.daemon import DaemonError, NoDaemonError, ask, fail
from supervisord_vllm.cli.instance import ConfigOption, InstanceError, NameOption, StateDirOption, find
from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.redaction import printable


class Direction(str, Enum):
    """Which way a lever is moved."""

    UP = "up"
    DOWN = "down"


TRIAL_PATIENCE_S = 90.0
"""The program that takes over is tried first, and then reads the engine's whole log."""
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
    reason: Reason = "",
    lasting: Annotated[
        str | None, typer.Option("--for", help='How long: "90s", "30m", "2h". Default: until resume.')
    ] = None,
    name: NameOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Change no configuration until ``resume``, or for a time; restarts with the same one go on."""
    if lasting is None:
        _command("hold", reason, name, config, state_dir)
        return
    from supervisord_vllm.config.units import positive_duration  # pydantic, and only here

    try:
        positive_duration(lasting)
    except ValueError as error:
        fail(f"hold: --for: {error}", ExitCode.USAGE)
    _command("hold", reason, name, config, state_dir, {"for": lasting})


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
    """Forget failures, the budget and the last known good; an engine that was given up starts again. Without a daemon
    the spent budget is forgotten."""
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


def upgrade(
    reason: Reason = "", name: NameOption = None, config: ConfigOption = None, state_dir: StateDirOption = None
) -> None:
    """Replace the daemon by the program and policy that are there now; the engine goes on, no request fails."""
    try:
        instance = find(name, config, state_dir)
        before = _daemon(ask(instance.socket, "/status"))
        answer = ask(instance.socket, "/command", {"verb": "upgrade", "reason": reason}, TRIAL_PATIENCE_S)
        print(printable(str(answer.get("message", "done"))), flush=True)
        after = _successor(instance.socket, before)
    except InstanceError as error:
        fail(str(error), error.code)
    except NoDaemonError as error:
        fail(f"upgrade: {error}; start one with vllm-supervise --config FILE", ExitCode.REFUSED)
    except DaemonError as error:
        fail(f"upgrade: {error}", ExitCode.REFUSED)
    print(printable(f"done: the instance is {after.get('state')}"))


def _successor(socket: Path, before: object) -> dict[str, Any]:
    """The status that the daemon gives which replaces the one that answered before."""
    deadline = time.monotonic() + TRIAL_PATIENCE_S
    while True:
        try:
            after = ask(socket, "/status", timeout=TRIAL_PATIENCE_S)
        except DaemonError:  # taken up by the one before, in its last moment
            if time.monotonic() > deadline:
                raise
        else:
            if _daemon(after) != before:
                return after
            if time.monotonic() > deadline:
                raise DaemonError("the daemon before still answers; its log says why")
        time.sleep(0.05)


def _daemon(status: dict[str, Any]) -> object:
    """Which run of a daemon answered."""
    daemon = status.get("daemon")
    return daemon.get("since") if isinstance(daemon, dict) else None


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
        if verb != "reset":
            fail(f"{verb}: {error}; start one with vllm-supervise --config FILE", ExitCode.REFUSED)
        from supervisord_vllm.cli.forget import forget

        answer = {"message": forget(instance)}
    except DaemonError as error:
        fail(f"{verb}: {error}", ExitCode.REFUSED)
    print(printable(str(answer.get("message", "done"))))
