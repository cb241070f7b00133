"""Crash points: each story is recorded and some of its points are tried; `make chaos` tries all of them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from crash.points import place
from crash.stories import (
    MODES,
    POINTS,
    STORIES,
    Case,
    cases,
    check,
    instance_of,
    prepare,
    start_again,
    survive,
)
from daemon_process import until

pytestmark = pytest.mark.slow

SAMPLE = 1
"""Of each story, in a run of the suite."""
FOUND = (
    Case("life", "write state/lock #1", "fail"),  # a lock without a name on it ended the daemon
    Case("life", "commit insert facts Exited #1", "kill-after"),  # a dead engine's cgroup was left
    Case("life", "commit delete meta carried #1", "kill-before"),  # a shutdown was taken for an operator's stop
)
"""What a campaign has found once."""


@pytest.mark.parametrize("story", STORIES)
def test_a_daemon_that_fails_or_dies_at_a_point_leaves_what_the_next_one_finds_and_finishes(story: str) -> None:
    every = cases(story)
    assert len(every) > 80, "the points of a whole life are many"
    assert {case.mode for case in every} >= {"fail", "kill-before", "kill-after"} & set(MODES)
    for case in random.Random(story).sample(every, SAMPLE):
        print(survive(case))


@pytest.mark.parametrize("case", FOUND, ids=str)
def test_what_was_found_once_is_tried_every_time(case: Case) -> None:
    assert "not reached" not in survive(case)


def test_a_daemon_that_is_ended_as_soon_as_it_supervises_ends_what_it_found() -> None:
    with instance_of("leftovers") as it:
        prepare(it, "leftovers")
        assert it.marked()
        already = it.errors.read_text().count("supervising")
        start_again(it)
        until(lambda: it.errors.read_text().count("supervising") > already, it.told)
        assert it.term() == 0
        check(it)


def test_the_points_count_what_changes_a_file_or_starts_a_process_and_see_what_escapes(tmp_path: Path) -> None:
    program = (
        "import os, sqlite3, subprocess, sys\n"
        "from pathlib import Path\n"
        "from crash import points\n"
        "counted = points.Points()\n"
        "for wrap in (points.wrap_sqlite, points.wrap_processes, points.wrap_calls): wrap(counted)\n"
        "root = Path(os.environ['CRASH_ROOTS'])\n"
        "(root / 'folder').mkdir()\n"
        "(root / 'file').write_text('text')\n"
        "(root / 'file').rename(root / 'moved')\n"
        "file = os.open(root / 'moved', os.O_RDWR)\n"
        "os.write(file, b'more'); os.fsync(file); os.ftruncate(file, 0); os.close(file)\n"
        "(root / 'moved').unlink()\n"
        "(Path('/tmp') / root.name).exists()\n"
        "subprocess.run(['true'])\n"
        "store = sqlite3.connect(root / 'store', isolation_level=None)\n"
        "store.execute('BEGIN'); store.execute('CREATE TABLE meta(key, value)')\n"
        "store.execute('INSERT INTO meta VALUES(?, ?)', ('held', 1)); store.execute('COMMIT'); store.close()\n"
        "os.mknod(root / 'fifo', 0o010600)\n"
        "__import__('posix').open(root / 'fifo', os.O_RDWR)\n"
    )
    trace = tmp_path / "trace"
    root = tmp_path / "root"
    root.mkdir()
    tests = POINTS.parents[1]
    env = {
        **os.environ,
        "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}",
        "CRASH_ROOTS": str(root),
        "CRASH_TRACE": str(trace),
    }
    ran = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told = trace.read_text()
    for point in (
        "mkdir root/folder #1",
        "make root/file #1",
        "rename root/file #1",
        "write root/moved #1",
        "fsync root/moved #1",
        "ftruncate root/moved #1",
        "unlink root/moved #1",
        "spawn true #1",
        "open database root/store #1",
        "commit insert meta held #1",
        "close database #1",
    ):
        assert f'"point": "{point}"' in told
    assert told.count('"point"') == 11
    assert '"escaped": "root/fifo"' in told


def test_what_differs_from_run_to_run_is_no_part_of_a_points_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRASH_ROOTS", "/a/state")
    assert place("/a/state/launches/000001.log") == "state/launches/000001.log"
    assert place("/a/state/x.unreadable-20260101T000000Z") == "state/x.unreadable-TIME"
    assert place("/a/states/x") is None
    assert place("/b/x") is None
