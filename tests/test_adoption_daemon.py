"""The daemon's own death and replacement, on the stand-in engine: the engine outlives both."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_process import MODEL, DaemonProcess, daemon, until
from supervisord_vllm.redaction import printable


def kill(it: DaemonProcess) -> None:
    """SIGKILL to the daemon alone."""
    assert it.process is not None
    it.process.kill()
    it.process.wait()


def identity(document: dict[str, Any]) -> tuple[int, int, str]:
    """Launch number, pid and start time of the engine's main process."""
    launch = document["launch"]
    ticks = Path(f"/proc/{launch['pid']}/stat").read_text().rpartition(")")[2].split()[19]
    return launch["number"], launch["pid"], ticks


def copied(it: DaemonProcess) -> list[str]:
    """The engine's lines as they were copied to standard output."""
    return it.output.read_bytes().decode().split("\n")


def launch_log(it: DaemonProcess, number: int) -> list[str]:
    """The lines of one launch, as they must be copied."""
    log = it.folder / "state" / "launches" / f"{number:06d}.log"
    return [printable(line.rstrip("\r")) for line in log.read_bytes().decode().split("\n")]


@contextlib.contextmanager
def streaming(it: DaemonProcess, tokens: int = 120) -> Iterator[list[str]]:
    """One long streamed completion meanwhile; afterwards its events, the last of which must be the regular end."""
    asked = {"model": MODEL, "prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{it.port}/v1/completions",
        data=json.dumps(asked).encode(),
        headers={"Content-Type": "application/json"},
    )
    events: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=90) as response:
            for line in response:
                events.append(line.decode().strip())
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    yield events
    reader.join(90)
    assert [event for event in events if event][-1] == "data: [DONE]"


def test_an_engine_outlives_the_daemon_and_is_adopted_with_launch_proof_and_identity() -> None:
    with daemon() as it:
        it.start()
        before = it.reaches("serving", 1)
        with streaming(it):
            kill(it)
            it.start()
            after = it.reaches("serving", 1)
        assert identity(after) == identity(before)
        assert after["proven"]
        assert after["launch"]["started_at"] == before["launch"]["started_at"]
        assert len(it.history()["launches"]) == 1
        assert "an engine of the daemon before is adopted" in it.told()
        assert it.term() == 0
        assert copied(it) == launch_log(it, 1)


def test_an_upgrade_keeps_pid_engine_launch_and_proof_and_no_line_is_lost_or_doubled() -> None:
    with daemon() as it:
        it.start()
        before = it.reaches("serving", 1)
        assert it.process is not None
        with streaming(it):
            assert "launch 1" in it.verb("upgrade", "--reason", "a test")
            after = it.reaches("serving", 1)
        assert after["daemon"]["pid"] == before["daemon"]["pid"] == it.process.pid
        assert after["daemon"]["since"] != before["daemon"]["since"]
        assert identity(after) == identity(before)
        assert after["proven"]
        it.verb("upgrade")
        assert identity(it.reaches("serving", 1)) == identity(before)
        assert it.term() == 0
        assert copied(it) == launch_log(it, 1)


def test_a_failure_while_no_daemon_looked_is_judged_from_the_log_by_the_next_one() -> None:
    with daemon(faults="oom at=running after-requests=3 launch=1") as it:
        it.start()
        it.reaches("serving", 1)
        kill(it)
        until(lambda: it.complete()[0] != 200, lambda: "it still answers")
        until(lambda: not it.marked(), it.marked)
        it.start()
        serving = it.reaches("serving", 2)
        assert serving["decision"]["kind"] == "oom_runtime"
        assert serving["launch"]["levers"]["gpu_memory_utilization"] < 0.9
        assert "exit status" not in serving["decision"]["sentence"]


def test_a_failure_right_after_an_upgrade_is_told_with_its_exit_status() -> None:
    with daemon(faults="oom at=running after-requests=3 launch=1") as it:
        it.start()
        it.reaches("serving", 1)
        it.verb("upgrade")
        until(lambda: it.complete()[0] != 200, lambda: "it still answers")
        serving = it.reaches("serving", 2)
        assert serving["decision"]["kind"] == "oom_runtime"
        assert it.history()["launches"][0]["exit_code"] is not None


def test_an_edited_policy_applies_from_the_next_launch_after_an_upgrade() -> None:
    with daemon() as it:
        it.start()
        before = it.reaches("serving", 1)
        it.policy.write_text(
            it.policy.read_text().replace("gpu-memory-utilization = 0.90", "gpu-memory-utilization = 0.80")
        )
        it.verb("upgrade")
        after = it.reaches("serving", 1)
        assert identity(after) == identity(before)
        assert after["declared"]["gpu_memory_utilization"] == 0.8
        assert after["launch"]["levers"]["gpu_memory_utilization"] == 0.9
        it.verb("restart")
        assert it.reaches("serving", 2)["launch"]["levers"]["gpu_memory_utilization"] == 0.8


def test_a_program_that_does_not_start_is_noticed_before_the_daemon_lets_go() -> None:
    with daemon() as it:
        it.start()
        before = it.reaches("serving", 1)
        good = it.policy.read_text()
        it.policy.write_text(good + "\n[unheard-of]\n")
        said = it.verb("upgrade", status=3)
        assert "unheard-of" in said
        assert "this daemon goes on" in said
        assert it.reaches("serving", 1)["daemon"] == {**before["daemon"], "counters": it.status()["daemon"]["counters"]}
        it.policy.write_text(good.replace("/state", "/elsewhere"))
        assert "state-dir would be" in it.verb("upgrade", "--state-dir", str(it.folder / "state"), status=3)
        it.policy.write_text(good)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "upgrade"])
def test_a_stop_in_progress_goes_on_with_what_is_left_of_its_time(how: str) -> None:
    with daemon(faults="ignore-term launch=1") as it:
        it.policy.write_text(it.policy.read_text() + '[stop]\ngrace = "8s"\n')
        it.start()
        it.reaches("serving", 1)
        it.verb("stop")
        it.reaches("stopping", 1)
        if how == "kill":
            kill(it)
            it.start()
        else:
            it.verb("upgrade")
        it.reaches("stopped")
        assert not it.marked()


def test_an_instance_that_its_operator_stopped_stays_stopped_when_the_daemon_crashes() -> None:
    with daemon() as it:
        it.start()
        it.reaches("serving", 1)
        it.verb("stop")
        it.reaches("stopped")
        kill(it)
        it.start()
        it.reaches("stopped")
        it.verb("start")
        it.reaches("serving", 2)
        assert it.term() == 0
        it.start()
        it.reaches("serving", 3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "upgrade"])
def test_a_start_goes_on_under_the_next_daemon(how: str) -> None:
    with daemon(faults="slow-start launch=1 factor=40") as it:
        it.start()
        before = it.reaches("starting", 1)
        until(lambda: it.status().get("launch", {}).get("pid"), it.told)
        before = it.status()
        if how == "kill":
            kill(it)
            it.start()
        else:
            it.verb("upgrade")
        after = it.reaches("serving", 1)
        assert identity(after) == identity(before)
        assert len(it.history()["launches"]) == 1


def test_a_process_that_only_has_the_recorded_pid_is_not_adopted() -> None:
    with daemon() as it:
        it.start()
        first = it.reaches("serving", 1)
        kill(it)
        for pid in it.marked():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not it.marked(), it.marked)
        it.start()
        assert identity(it.reaches("serving", 2)) != (1, first["launch"]["pid"], "")
