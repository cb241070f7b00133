"""`reap`: what a killed daemon left is ended without a daemon, and nothing is touched beside a living one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from daemon_process import daemon
from family import stranger


def test_reap_ends_what_a_killed_daemon_left_and_nothing_else() -> None:
    with daemon() as it, stranger() as foreign:
        it.start()
        it.reaches("serving", 1)
        assert it.process is not None
        refused = it.verb("reap", status=3)
        assert f"pid {it.process.pid}" in refused
        assert it.complete()[0] == 200
        it.process.kill()
        it.process.wait()
        left = it.marked()
        assert left, "the orphans are the point of this test"
        told = json.loads(it.verb("reap", "--json"))
        assert {process["pid"] for process in told["ended"]} >= set(left)
        assert told["survivors"] == []
        assert it.marked() == []
        assert "nothing is left" in it.verb("reap")
        assert foreign.poll() is None


def test_reap_of_an_instance_that_never_ran_finds_nothing() -> None:
    with daemon() as it:
        assert "nothing is left" in it.verb("reap")


def test_a_policy_that_cannot_be_read_does_not_keep_an_engine_alive_where_systemd_names_its_folder() -> None:
    with daemon() as it:
        it.start()
        it.reaches("serving", 1)
        assert it.process is not None
        it.process.kill()
        it.process.wait()
        good = it.policy.read_text()
        it.policy.write_text("name = ")
        command = [sys.executable, "-m", "supervisord_vllm.cli.main", "reap", "--config", str(it.policy)]
        alone = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (alone.returncode, "not valid TOML" in alone.stderr) == (78, True)
        assert it.marked()
        environ = {**os.environ, "STATE_DIRECTORY": str(it.folder / "state")}
        subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert it.marked() == []
        it.policy.write_text(good)
