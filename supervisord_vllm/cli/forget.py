"""``reset`` where no daemon runs: a spent budget that would make the next start give up at once is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from supervisord_vllm import places
from supervisord_vllm.cli.daemon import fail
from supervisord_vllm.exitcodes import ExitCode

if TYPE_CHECKING:
    from supervisord_vllm.cli.instance import Instance


def forget(instance: Instance) -> str:
    """Forget it, as ``run --reset`` would; what to tell. A daemon that runs, and no history, end the command (3)."""
    from supervisord_vllm.host.lock import LockError, LockHeld, lock_state
    from supervisord_vllm.store import Store, StoreError

    path: Path = instance.state_dir / places.STORE
    if not path.exists():
        fail(f"reset: no daemon runs, and there is no history at {path}", ExitCode.REFUSED)
    try:
        lock = lock_state(instance.state_dir)
    except (LockHeld, LockError) as error:
        fail(f"reset: {error}", ExitCode.REFUSED)
    try:
        store = Store.open(path, warn=lambda *_, **__: None)
        store.clear_exhausted()
        written = store.close()
    except StoreError as error:
        fail(f"reset: {error}", ExitCode.REFUSED)
    finally:
        lock.release()
    if not written:
        fail(f"reset: {path} could not be written in time", ExitCode.INTERNAL)
    return "reset: no daemon runs; the spent budget is forgotten, the next start begins afresh"
