"""Locks and shared memory of dead owners are moved aside, once; what could still be somebody's stays."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from supervisord_vllm.host import leftovers

SHM = Path("/dev/shm")


def old(path: Path, content: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, (time.time() - 60, time.time() - 60))
    return path


def test_a_lock_without_an_owner_is_moved_aside_and_does_not_pile_up(tmp_path: Path) -> None:
    baton, hub = old(tmp_path / "ext/fused/lock"), old(tmp_path / "hub/.locks/models--a/b.lock")
    data = old(tmp_path / "ext/fused/unlock.py")
    assert leftovers.clear_locks([tmp_path]) == (str(baton), str(hub))
    assert not baton.exists()
    assert data.exists()
    assert (baton.parent / f"lock{leftovers.ASIDE}").exists()
    assert leftovers.clear_locks([tmp_path]) == ()
    assert not (baton.parent / f"lock{leftovers.ASIDE}").exists(), "the second look removes what the first moved"


def test_a_lock_that_somebody_has_open_or_that_is_young_stays(tmp_path: Path) -> None:
    held, young = old(tmp_path / "a.lock"), tmp_path / "b.lock"
    young.write_text("")
    with held.open():
        assert leftovers.clear_locks([tmp_path]) == ()
    assert held.exists()
    assert young.exists()


def test_caches_are_those_of_the_engines_environment(tmp_path: Path) -> None:
    for name in ("home/.cache/vllm", "hub", "triton"):
        (tmp_path / name).mkdir(parents=True)
    env = {
        "HOME": str(tmp_path / "home"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "none"),
    }
    assert leftovers.caches(env) == [tmp_path / "home/.cache/vllm", tmp_path / "triton", tmp_path / "hub"]
    (tmp_path / "hub/blob").write_bytes(b"x" * 1000)
    assert leftovers.size_bytes(leftovers.caches(env)) == 1000


@pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="/dev/shm cannot be written")
def test_a_segment_is_ours_while_we_map_it_and_is_removed_only_once_nobody_does() -> None:
    name = f"psm_test_{uuid.uuid4().hex}"
    path = SHM / name
    path.write_bytes(b"x" * mmap.PAGESIZE)
    try:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        assert name in leftovers.segments([os.getpid()])
        assert leftovers.clear_segments([name]) == ()
        assert path.exists()
        mapped.close()
        assert name not in leftovers.segments([os.getpid()])
        assert leftovers.clear_segments(["../x", "none", name]) == (str(path),)
        assert not path.exists()
    finally:
        for left in SHM.glob(f"{name}*"):
            left.unlink()


SEMAPHORE = """
import multiprocessing, os, sys
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name.lstrip("/"), flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="/dev/shm cannot be written")
def test_a_semaphore_is_found_although_its_mapping_has_another_name() -> None:
    with subprocess.Popen([sys.executable, "-c", SEMAPHORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        name = f"sem.{process.stdout.readline().decode().strip()}"
        assert name in leftovers.segments([process.pid])
        assert leftovers.clear_segments([name]) == ()
        process.communicate(b"\n")
    # Its resource tracker removes it now, and so may we: whoever comes first.
    leftovers.clear_segments([name])
    assert not (SHM / name).exists()
