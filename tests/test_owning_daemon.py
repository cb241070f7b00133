"""Owning the process, on the whole daemon with the stand-in engine: forced stops, the kernel's word, a wedged start."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from daemon_process import DaemonProcess, daemon, until
from test_daemon import replayed

KMSG = Path("/dev/kmsg")


def engine_core(it: DaemonProcess) -> int:
    """The pid of the launch's EngineCore."""
    (pid,) = [pid for pid in it.marked() if (Path(f"/proc/{pid}/cmdline")).read_bytes().startswith(b"VLLM::EngineCore")]
    return pid


def test_a_second_stop_does_not_wait_for_an_engine_that_ignores_the_first() -> None:
    with daemon(faults="ignore-term") as it:
        it.policy.write_text(it.policy.read_text() + '[stop]\ngrace = "10m"\n')
        it.start()
        it.reaches("serving", 1)
        begun = time.monotonic()
        assert "stopping" in it.verb("stop")
        assert "the engine is killed" in it.verb("stop")
        it.reaches("stopped")
        assert time.monotonic() - begun < 60
        assert it.marked() == []


def test_a_second_sigterm_does_not_wait_either_and_the_daemon_still_ends_with_zero() -> None:
    with daemon(faults="ignore-term") as it:
        it.policy.write_text(it.policy.read_text() + '[stop]\ngrace = "10m"\n')
        it.start()
        it.reaches("serving", 1)
        assert it.process is not None
        it.process.send_signal(signal.SIGTERM)
        it.reaches("stopping")
        it.process.send_signal(signal.SIGTERM)
        assert it.wait() == 0
        assert it.marked() == []


def test_a_start_that_shows_nothing_is_wedged_and_the_same_comes_up() -> None:
    with daemon(faults="hang at=loading launch=1") as it:
        stop = '[stop]\ninterrupt = "300ms"\nterminate = "300ms"\n'
        it.policy.write_text(it.policy.read_text() + '[start]\npatience = "3s"\n' + stop)
        it.start()
        it.reaches("serving", 2)
        (decision,) = it.history()["decisions"]
        assert decision["kind"] == "startup_wedged"
        assert decision["moves"] == []
        assert "no new line of output" in decision["sentence"]
        assert it.term() == 0
        replayed(it.folder)


@pytest.mark.skipif(not os.access(KMSG, os.R_OK | os.W_OK), reason="/dev/kmsg cannot be read and written")
def test_a_process_that_the_kernels_log_names_as_killed_for_memory_explains_the_death() -> None:
    """The line is ours, written into the real log; the real killer is in the suite on real vLLM."""
    with daemon() as it:
        it.start()
        it.reaches("serving", 1)
        core = engine_core(it)
        until(lambda: any(device["own_bytes"] for device in it.status().get("memory") or []), it.told)
        KMSG.write_text(f"Out of memory: Killed process {core} (VLLM::EngineCor) total-vm:1kB, anon-rss:1kB\n")
        os.kill(core, signal.SIGKILL)
        assert it.wait() == 69
        decision = it.history()["decisions"][-1]
        assert decision["kind"] == "host_oom"
        assert f"Killed process {core}" in " ".join(evidence["text"] for evidence in decision["evidence"])
        replayed(it.folder)


def test_an_engine_without_an_api_is_up_once_it_has_its_cache_and_is_never_asked() -> None:
    with daemon(args='["--headless"]') as it:
        it.policy.write_text(it.policy.read_text() + '[hang]\npatience = "1s"\n')
        it.start()
        found = it.reaches("serving", 1)
        assert found["load"] is None
        assert it.history()["decisions"] == []
        assert it.term() == 0
