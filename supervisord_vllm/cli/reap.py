"""``reap``: end what an earlier daemon of this instance left, where no daemon runs to do it.

Only what is proven ours is touched: processes with this instance's marker or in a cgroup of one of its launches, and
their descendants. Everything else on the machine is at most named, by ``preflight``.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisord_vllm.cli.daemon import fail
from supervisord_vllm.cli.instance import ConfigOption, Instance, InstanceError, NameOption, StateDirOption, find
from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.redaction import printable

if TYPE_CHECKING:
    from supervisord_vllm.core.facts import ProcessRef

JsonOption = Annotated[bool, typer.Option("--json", help="A JSON object: ended, survivors.")]


def reap(
    as_json: JsonOption = False,
    name: NameOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """End processes of this instance's earlier launches. Refused (3) while a daemon runs: they are its engine's."""
    try:
        instance = _instance(name, config, state_dir)
    except InstanceError as error:
        fail(str(error), error.code)
    ended, survivors = _reap(instance.state_dir)
    if as_json:
        print(json.dumps({"schema": 1, "ended": _listed(ended), "survivors": _listed(survivors)}))
    elif not ended and not survivors:
        print("nothing is left of an earlier launch")
    for process in () if as_json else ended:
        print(printable(f"ended {process}, user {process.user or 'unknown'}"))
    if survivors:
        names = ", ".join(str(process) for process in survivors)
        fail(f"reap: cannot be ended: {names}; a process in state D waits for a driver or a disk", ExitCode.INTERNAL)


def _instance(name: str | None, config: Path | None, state_dir: Path | None) -> Instance:
    """Whose processes. A policy that cannot be read does not keep its engine alive where systemd says which folder is
    the instance's: as ``ExecStopPost=`` this runs just after a daemon that could not read it either."""
    try:
        return find(name, config, state_dir)
    except InstanceError as error:
        if error.code is not ExitCode.CONFIGURATION or not os.environ.get("STATE_DIRECTORY"):
            raise
        return find()


def _reap(state_dir: Path) -> tuple[tuple[ProcessRef, ...], tuple[ProcessRef, ...]]:
    from supervisord_vllm import places
    from supervisord_vllm.host.lock import LockError, LockHeld, lock_state
    from supervisord_vllm.host.tree import reap_leftovers

    if not state_dir.is_dir():
        # The marker is made of the folder's path alone: processes can outlive a folder that somebody removed.
        return asyncio.run(reap_leftovers(places.instance(state_dir)))
    try:
        lock = lock_state(state_dir)
    except LockHeld as held:
        fail(f"reap: {held}; `vllm-supervise stop` ends its engine", ExitCode.REFUSED)
    except LockError as error:
        fail(f"reap: {error}", ExitCode.REFUSED)
    try:
        return asyncio.run(reap_leftovers(places.instance(state_dir)))
    finally:
        lock.release()


def _listed(processes: tuple[ProcessRef, ...]) -> list[dict[str, Any]]:
    return [
        {
            "pid": process.pid,
            "user": process.user,
            "command": process.command,
            "memory_bytes": process.memory_bytes,
            "state": process.state or None,
        }
        for process in processes
    ]
