"""A daemon in the foreground: what must be ours before it begins, and what is closed after it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import structlog

from supervisord_vllm import __version__
from supervisord_vllm.config import ConfigError, Settings
from supervisord_vllm.core.adopting import carried
from supervisord_vllm.daemon import Daemon
from supervisord_vllm.engine.command import executable
from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.handover import Handover, command, give, take
from supervisord_vllm.host.lock import HeldLocks, LockError, LockHeld, lock_state
from supervisord_vllm.host.systemd import to_journal, with_priority
from supervisord_vllm.log import EngineOutput, configure
from supervisord_vllm.places import STORE
from supervisord_vllm.redaction import Redactor
from supervisord_vllm.store import Store, StoreError


def run(settings: Settings, *, reset: bool = False) -> int:
    """Supervise in the foreground; the exit status. What cannot work is one line and 78, before anything starts.

    An `upgrade` ends in an execve of this very command. Should that fail, the daemon goes on as one that was upgraded
    to what it is.
    """
    # A watchdog ends a loop that stands still by SIGABRT: the journal then shows where it stood.
    faulthandler.enable(2, all_threads=False)
    redactor = Redactor(settings.secrets)
    warnings: list[str] = []
    while True:
        ended = _run_once(settings, redactor, take(os.environ), reset=reset, warnings=warnings)
        if not isinstance(ended, Handover):
            return ended
        reset = False
        warnings = [f"upgrade: {_replaced(ended)}; going on as before"]


def _replaced(handover: Handover) -> str:
    """Replace this process; why that failed, if it returns."""
    argv = command()
    give(handover, os.environ)
    try:
        os.execvpe(argv[0], argv, os.environ)  # noqa: S606 - the command that we were started with
    except OSError as error:
        return f"cannot execute {argv[0]}: {error.strerror}"


def try_out(settings: Settings, state_dir: Path) -> str | None:
    """Why this program could not take over from the daemon that asks and keeps its state there: the policy is good
    already, is the state that comes on standard input readable? Where it could, it says so on standard output."""
    if settings.state_dir != state_dir:
        return (
            f"state-dir would be {settings.state_dir} instead of {state_dir}: what lives there would not be ours any"
            " more; stop the daemon and start it anew"
        )
    if carried(sys.stdin.read()) is None:
        return "this version cannot read the state of the running one, so the engine would be restarted"
    try:
        _check_command(settings)
    except ConfigError as error:
        return str(error)
    sys.stdout.write(json.dumps({"version": __version__}))
    return None


def _run_once(
    settings: Settings, redactor: Redactor, handover: Handover | None, *, reset: bool, warnings: list[str]
) -> int | Handover:
    log = configure(settings.log.level, settings.log.format, redactor.text)
    for warning in warnings:
        structlog.get_logger().error(warning)
    output = EngineOutput(redactor.text) if settings.log.engine_output else None
    lock: HeldLocks | None = HeldLocks(handover.state_lock) if handover is not None else None
    store: Store | None = None
    ended: int | Handover = ExitCode.CONFIGURATION
    try:
        lock = lock or _claim(settings)
        store = Store.open(settings.state_dir / STORE, warn=structlog.get_logger().warning, clean=redactor.text)
        if output is not None:
            with contextlib.suppress(OSError):
                output.keep_place(settings.state_dir / "launches")
        ended = asyncio.run(_main(settings, store, output, redactor, handover, reset=reset))
        if isinstance(ended, Handover):
            ended, lock = replace(ended, state_lock=lock.descriptors), None
    except (ConfigError, StoreError, LockHeld, LockError) as error:
        log.close()
        fix = "; stop that daemon, or give this one a state-dir of its own" if isinstance(error, LockHeld) else ""
        text = f"vllm-supervise: {redactor.text(str(error))}{fix}"
        os.write(2, (with_priority(text, "error") if to_journal(2, os.environ) else text).encode() + b"\n")
    finally:
        if store is not None:
            store.close()
        if output is not None:
            output.close()
        log.close()
        if lock is not None:
            lock.release()
    return ended


async def _main(
    settings: Settings,
    store: Store,
    output: EngineOutput | None,
    redactor: Redactor,
    handover: Handover | None,
    *,
    reset: bool,
) -> int | Handover:
    return await Daemon(settings, store, output, redactor, handover).main(reset=reset)


def _claim(settings: Settings) -> HeldLocks:
    """The state directory, ours alone; and a command that exists.

    Raises:
        ConfigError: one line with the place and the fix.
        LockHeld: another daemon has it.
        LockError: the directory cannot be written.
    """
    _check_command(settings)
    for name, folder, mode in (
        ("state-dir", settings.state_dir, 0o750),
        ("state-dir", settings.state_dir / "launches", 0o700),
        ("runtime-dir", settings.runtime_dir, 0o755),
    ):
        try:
            folder.mkdir(mode=mode, parents=True, exist_ok=True)
        except OSError as error:  # noqa: PERF203 - three folders
            where = settings.origins.get(name, "default")
            raise ConfigError(
                f"{where}: {name}: cannot make {folder}: {error.strerror}; name a folder that this user may write"
            ) from error
    return lock_state(settings.state_dir)


def _check_command(settings: Settings) -> None:
    """There is a command to start engines with.

    Raises:
        ConfigError: one line with the place and the fix.
    """
    if executable(settings.engine, os.environ) is None:
        program = settings.engine.command[0]
        where = settings.origins.get("engine.command", "default")
        raise ConfigError(
            f"{where}: engine.command: no program {program!r} that may be executed;"
            ' name vLLM\'s own, as in command = ["/opt/vllm/bin/vllm", "serve"]'
        )
