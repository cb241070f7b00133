"""25 seeded deaths of the daemon on the stand-in engine, under streaming load, some with a full disk (chaos: 500).

Needs root: the state directory is a disk of its own, mounted in a namespace.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from real.conftest import unavailable

SCRIPT = Path(__file__).parents[1] / "chaos" / "deaths.py"

pytestmark = pytest.mark.real


def test_a_daemon_that_dies_at_any_moment_costs_no_line_no_stream_and_no_second_engine() -> None:
    if os.geteuid() != 0:
        unavailable("a disk is mounted in a namespace of its own: run this as root")
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "25"], capture_output=True, text=True, check=False, timeout=1200
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
