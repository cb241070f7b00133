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
SEEDS = ((1, 15), (16, 10))
"""First seed and number of rounds of what runs side by side: a round mostly waits."""

pytestmark = pytest.mark.real


def test_a_daemon_that_dies_at_any_moment_costs_no_line_no_stream_and_no_second_engine() -> None:
    if os.geteuid() != 0:
        unavailable("a disk is mounted in a namespace of its own: run this as root")
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--first", str(first), "--rounds", str(rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for first, rounds in SEEDS
    ]
    try:
        told = [process.communicate(timeout=1200)[0] for process in running]
    finally:
        for process in running:
            process.terminate()  # broken off: it ends its daemon and takes its disk away
            process.wait()
    print(*told)
    assert [process.returncode for process in running] == [0, 0], "\n".join(told)
