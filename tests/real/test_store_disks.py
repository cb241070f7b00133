"""The store on real disks: full, read-only, frozen. Needs root (mounts in a namespace of their own)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from real.conftest import unavailable
from real.store_disk import STORIES

SCRIPT = Path(__file__).with_name("store_disk.py")
TESTS = SCRIPT.parents[1]

pytestmark = pytest.mark.real


@pytest.mark.parametrize("story", STORIES)
def test_no_disk_is_fatal_to_the_store(story: str, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        unavailable("disks are mounted in a namespace of their own: run this as root")
    env = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    argv = ["unshare", "--mount", sys.executable, str(SCRIPT), story, str(tmp_path)]
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
