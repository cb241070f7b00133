"""Locks between daemons."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from family import stranger
from supervisord_vllm.host import lock
from supervisord_vllm.host.lock import LockError, LockHeld, lock_devices, lock_state, state_owner

HOLD = """
import sys
from pathlib import Path
from supervisord_vllm.host.lock import lock_devices, lock_state
if sys.argv[1] == "state": held = lock_state(Path(sys.argv[2]))
else: held = lock_devices(sys.argv[3:], Path(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_daemon_on_a_state_directory_is_refused_by_name(tmp_path: Path) -> None:
    with stranger(sys.executable, "-c", HOLD, "state", str(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(LockHeld) as raised:
            lock_state(tmp_path)
        assert raised.value.owner.pid == process.pid
        name = Path(sys.executable).name
        assert str(raised.value) == f"state directory {tmp_path} is locked by pid {process.pid} ({name} -c)"
        owner = state_owner(tmp_path)
        assert owner is not None
        assert owner.pid == process.pid
        process.kill()
        process.wait()
        assert state_owner(tmp_path) is None
        lock_state(tmp_path).release()  # it ends with its holder
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600


def test_device_locks_are_taken_all_or_none(tmp_path: Path) -> None:
    with stranger(sys.executable, "-c", HOLD, "devices", str(tmp_path), "GPU-b") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(LockHeld, match=rf"GPU-b is locked by pid {process.pid}"):
            lock_devices(["GPU-c", "GPU-b", "GPU-a"], tmp_path)
        lock_devices(["GPU-a", "GPU-c", "GPU-a"], tmp_path).release()
    assert not (tmp_path / "GPU-d").exists()


def test_release_frees_and_may_be_repeated(tmp_path: Path) -> None:
    held = lock_devices(["host-memory"], tmp_path)
    with pytest.raises(LockHeld) as raised:
        lock_devices(["host-memory"], tmp_path)
    assert raised.value.owner.pid == os.getpid()
    held.release()
    held.release()
    lock_devices(["host-memory"], tmp_path).release()


def test_a_lock_is_not_inherited_by_the_engine(tmp_path: Path) -> None:
    held = lock_devices(["GPU-a"], tmp_path)
    with stranger("/bin/sleep", "600"):
        held.release()
        lock_devices(["GPU-a"], tmp_path).release()


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    folder.mkdir()
    lock_devices(["../../etc/x"], folder).release()
    assert [path.name for path in folder.iterdir()] == [".._.._etc_x"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_lock_file_of_another_user_can_be_locked(tmp_path: Path) -> None:
    """In the machine's folder the file may belong to anybody: only its being open counts."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    folder = Path(f"/run/lock/supervise-test-{os.getpid()}")
    folder.mkdir(mode=0o1777)
    folder.chmod(0o1777)
    try:
        lock_devices(["GPU-a"], folder).release()
        (folder / "GPU-a").chmod(0o644)
        code = (
            "import fcntl, os; f = os.open('GPU-a', os.O_RDONLY)\n"
            "try: os.open('GPU-a', os.O_RDWR); print('writable')\n"
            "except PermissionError: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB); print('locked')"
        )
        argv = ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3", "-c", code]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
        assert done.stdout == "locked\n"  # the precondition: the file is not writable, but can be locked
        monkey = pytest.MonkeyPatch()
        real = os.open

        def not_writable(path: Path, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_RDWR and not flags & os.O_CREAT:
                raise PermissionError(13, "Permission denied")
            return real(path, flags, mode)

        with monkey.context() as patched:
            patched.setattr(os, "open", not_writable)
            held = lock_devices(["GPU-a"], folder)
        with pytest.raises(LockHeld):
            lock_devices(["GPU-a"], folder)
        held.release()
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.mark.parametrize("kind", ["missing folder", "folder", "link", "pipe"])
def test_what_is_no_lock_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state" / "lock"
    if kind != "missing folder":
        path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "target").write_text("keep\n")
        path.symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(LockError, match=str(path)):
        lock_state(tmp_path / "state")
    assert kind != "link" or (tmp_path / "target").read_text() == "keep\n"


def test_the_locks_folder_falls_back_to_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_DIR", tmp_path / "machine")
    assert lock.lock_dir(tmp_path / "run") == tmp_path / "machine"
    assert stat.S_IMODE((tmp_path / "machine").stat().st_mode) == 0o1777
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(lock, "LOCK_DIR", tmp_path / "file" / "machine")
    assert lock.lock_dir(tmp_path / "run") == tmp_path / "run" / "locks"
    assert stat.S_IMODE((tmp_path / "run" / "locks").stat().st_mode) == 0o700
    with pytest.raises(LockError, match=r"no folder for device locks: neither .*machine nor .*locks can be written"):
        lock.lock_dir(tmp_path / "file")
