"""A daemon in the foreground: what must be ours before it begins, and what is closed after it."""

from __future__ import annotations

import asyncio
import os

import structlog

from supervisord_vllm.config import ConfigError, Settings
from supervisord_vllm.daemon import Daemon
from supervisord_vllm.engine.command import executable
from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.host.lock import HeldLocks, LockError, LockHeld, lock_state
from supervisord_vllm.log import EngineOutput, configure
from supervisord_vllm.places import STORE
from supervisord_vllm.redaction import Redactor
from supervisord_vllm.store import Store, StoreError


def run(settings: Settings, *, reset: bool = False) -> int:
    """Supervise in the foreground; the exit status. What cannot work is one line and 78, before anything starts."""
    redactor = Redactor(settings.secrets)
    log = configure(settings.log.level, settings.log.format, redactor.text)
    output = EngineOutput(redactor.text) if settings.log.engine_output else None
    lock: HeldLocks | None = None
    store: Store | None = None
    try:
        lock = _claim(settings)
        store = Store.open(settings.state_dir / STORE, warn=structlog.get_logger().warning, clean=redactor.text)
        return asyncio.run(_main(settings, store, output, redactor, reset=reset))
    except (ConfigError, StoreError, LockHeld, LockError) as error:
        log.close()
        fix = "; stop that daemon, or give this one a state-dir of its own" if isinstance(error, LockHeld) else ""
        os.write(2, f"vllm-supervise: {redactor.text(str(error))}{fix}\n".encode())
        return ExitCode.CONFIGURATION
    finally:
        if store is not None:
            store.close()
        if output is not None:
            output.close()
        log.close()
        if lock is not None:
            lock.release()


async def _main(
    settings: Settings, store: Store, output: EngineOutput | None, redactor: Redactor, *, reset: bool
) -> int:
    return await Daemon(settings, store, output, redactor).main(reset=reset)


def _claim(settings: Settings) -> HeldLocks:
    """The state directory, ours alone; and a command that exists.

    Raises:
        ConfigError: one line with the place and the fix.
        LockHeld: another daemon has it.
        LockError: the directory cannot be written.
    """
    if executable(settings.engine, os.environ) is None:
        program = settings.engine.command[0]
        where = settings.origins.get("engine.command", "default")
        raise ConfigError(
            f"{where}: engine.command: no program {program!r} that may be executed;"
            ' name vLLM\'s own, as in command = ["/opt/vllm/bin/vllm", "serve"]'
        )
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
