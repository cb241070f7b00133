"""Owning the process on real vLLM: nothing escapes, nothing hangs unseen, and a stop ends everything."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator

import pytest

from real.cage import Cage
from real.policies import policy
from real.sandbox import END, START, Json, Sandbox, sandbox
from real.vllm_cpu.install import VllmCpu, home
from real.waiting import until

pytestmark = pytest.mark.real

SMALL_KV = ("--kv-cache-memory-bytes", "64M")
HANG = '\n[hang]\npatience = "6s"\n[poll]\nmetrics = "1s"\n'
PATIENCE_S, CANARY_S, POLL_S = 6, 30, 2
GIVEN_UP = 69


def pids(box: Sandbox, comm: str) -> list[int]:
    """Processes of the engine with this name."""
    return [process.pid for process in box.live() if process.comm == comm]


def decisions_of(box: Sandbox, launch: int) -> list[Json]:
    """What was decided about one launch."""
    return [decision for decision in box.history()["decisions"] if decision["launch"] == launch]


def background(box: Sandbox, tokens: int) -> threading.Thread:
    """A request that may never be answered."""

    def ask() -> None:
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            box.engine.complete(max_tokens=tokens)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def busy(status: Json) -> bool:
    """Whether the engine says that it runs a request."""
    return bool(((status.get("load") or {}).get("running") or 0) >= 1)


def test_a_killed_api_server_and_a_killed_worker_leave_nothing_and_the_same_comes_back(
    vllm: VllmCpu, box: Sandbox
) -> None:
    text = policy(box, vllm, levers={"max-model-len": 1024}, args=SMALL_KV, worker=True, fork=False)
    box.start(text)
    first = box.wait_serving(launch=1)
    orphans = pids(box, "VLLM::EngineCor") + pids(box, "VLLM::Worker")
    assert len(orphans) == 2
    os.kill(first["launch"]["pid"], signal.SIGKILL)
    box.wait(lambda status: status["state"] != "serving", END, "the death to be noticed")
    until(lambda: not set(orphans) & {process.pid for process in box.live()}, END, "the orphans to be reaped")
    second = box.wait_serving(launch=2, seconds=2 * START)
    assert second["launch"]["levers"] == first["launch"]["levers"]
    assert box.exit_fact(1)["signal"] == signal.SIGKILL

    (worker,) = pids(box, "VLLM::Worker")
    os.kill(worker, signal.SIGKILL)
    third = box.wait_serving(launch=3, seconds=2 * START)
    assert third["launch"]["levers"] == first["launch"]["levers"]
    assert worker not in {process.pid for process in box.live()}
    for launch in (1, 2):
        decision = decisions_of(box, launch)[-1]
        assert decision["moves"] == []
        assert decision["action"] in {"restart_same", "kill_tree_then_restart_same"}, decision


def test_a_stopped_engine_under_load_is_found_an_idle_and_a_slow_one_are_not(vllm: VllmCpu, box: Sandbox) -> None:
    """Slow: a token takes 1.5 s. Saturated: two sequences run, the others wait for longer than the patience."""
    levers = {"max-model-len": 512, "max-num-seqs": 2}
    box.start(policy(box, vllm, levers=levers, args=SMALL_KV, env={"VLLMTEST_STEP_MS": "1500"}, fork=False) + HANG)
    box.wait_serving(launch=1)
    requests = [background(box, 8) for _ in range(4)]
    for request in requests:
        request.join(START)
        assert not request.is_alive(), "every request of a slow and saturated engine is answered"
    idle_until = time.monotonic() + PATIENCE_S + CANARY_S + 5 * POLL_S
    until(lambda: time.monotonic() > idle_until, 2 * CANARY_S + 30, "an idle time longer than patience and canary")
    status = box.status()
    assert status is not None
    assert (status["state"], status["launch"]["number"]) == ("serving", 1)
    assert box.history()["decisions"] == []

    (core,) = pids(box, "VLLM::EngineCor")
    background(box, 200)
    box.wait(busy, END, "a request to run")
    os.kill(core, signal.SIGSTOP)
    stopped = time.monotonic()
    box.wait(lambda found: found["state"] == "stopping", PATIENCE_S + CANARY_S + 20, "the hang to be found")
    assert time.monotonic() - stopped <= PATIENCE_S + CANARY_S + 10
    box.wait_serving(launch=2, seconds=2 * START)
    decision = decisions_of(box, 1)[-1]
    assert (decision["kind"], decision["action"]) == ("engine_hung", "kill_tree_then_restart_same")
    assert "no token came out" in decision["sentence"]
    assert core not in {process.pid for process in box.live()}


def test_a_step_that_never_returns_is_a_hang(vllm: VllmCpu, box: Sandbox) -> None:
    env = {"VLLMTEST_FAULT": "hang_step:30", "VLLMTEST_FAULT_ONCE": str(box.root / "fired")}
    box.start(policy(box, vllm, levers={"max-model-len": 512}, args=SMALL_KV, env=env) + HANG)
    box.wait_serving(launch=1)
    background(box, 100)
    until((box.root / "fired").exists, END, "the step to hang")
    box.wait_serving(launch=2, seconds=PATIENCE_S + CANARY_S + 2 * START)
    assert decisions_of(box, 1)[-1]["kind"] == "engine_hung"
    assert box.engine.complete(100)["usage"]["completion_tokens"] == 100


@pytest.mark.parametrize(
    "line",
    ["non-default args", "Starting to load model", "init engine"],
    ids=["importing", "weights", "warming-up"],
)
def test_a_stop_in_each_phase_of_the_start_ends_everything_in_time(vllm: VllmCpu, box: Sandbox, line: str) -> None:
    box.start(policy(box, vllm, levers={"max-model-len": 512}, args=SMALL_KV, fork=False))
    until(lambda: line in box.log(1), START, lambda: f"the phase {line}\n{box.report()}")
    begun = time.monotonic()
    box.signal(signal.SIGTERM)
    assert box.exit_code(END) == 0
    assert time.monotonic() - begun < 20
    assert box.left() == []


def test_a_second_stop_waits_no_longer_for_streams(vllm: VllmCpu, box: Sandbox) -> None:
    """vLLM would drain for two minutes (--shutdown-timeout); the operator who asks twice does not."""
    args = [*SMALL_KV, "--shutdown-timeout", "120"]
    env = {"VLLMTEST_STEP_MS": "100"}
    box.start(policy(box, vllm, levers={"max-model-len": 2048}, args=args, env=env))
    box.wait_serving(launch=1)
    with box.engine.stream(max_tokens=1500):
        box.cli("stop")
        box.wait(lambda status: status["state"] == "stopping", END, "the stop to begin")
        begun = time.monotonic()
        box.cli("stop")
        box.wait(lambda status: status["state"] == "stopped", END, "the forced stop to end")
        assert time.monotonic() - begun < 15
    assert box.live() == []


def test_a_kill_by_the_kernel_for_memory_is_named_as_such(vllm: VllmCpu, six_gib: Cage, box: Sandbox) -> None:
    env = {"VLLMTEST_FAULT": "leak_step:200"}
    box.start(policy(box, vllm, levers={"max-model-len": 512}, args=SMALL_KV, env=env), wrap=six_gib.command)
    box.wait_serving(launch=1)
    background(box, 200)
    assert box.exit_code(2 * START) == GIVEN_UP
    assert six_gib.oom_kills >= 1
    decision = decisions_of(box, 1)[-1]
    assert decision["kind"] == "host_oom"
    assert "OOM killer" in " ".join(evidence["text"] for evidence in decision["evidence"])


@pytest.fixture
def second_slot(engine_slot: None) -> Iterator[None]:
    """The machine's other slot too: this test runs two engines."""
    files = [(home() / f"engine-{number}").open("a") for number in (1, 2)]

    def take() -> bool:
        for file in files:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        return False

    until(take, 900, "another engine runs on this machine", every=0.5)
    yield
    for file in files:
        file.close()


def test_two_daemons_that_start_at_once_on_one_memory_are_serialised(
    vllm: VllmCpu, six_gib: Cage, second_slot: None, box: Sandbox
) -> None:
    """Each asks for 0.30 of 6 GiB: the second sees what the first has taken, and waits for it by name."""
    levers = {"gpu-memory-utilization": 0.30, "max-model-len": 512}
    with sandbox() as other:
        boxes = (box, other)
        for each in boxes:
            each.start(policy(each, vllm, levers=levers), wrap=six_gib.command)

        def one_waits_for_the_other() -> tuple[Sandbox, Sandbox] | None:
            found = [each.status() or {} for each in boxes]
            for first, second in ((0, 1), (1, 0)):
                starts = found[first].get("state") == "starting"
                if starts and "lock is held by pid" in str((found[second].get("next") or {}).get("what")):
                    return boxes[first], boxes[second]
            return None

        pair = until(one_waits_for_the_other, START, lambda: f"{[each.status() for each in boxes]}")
        assert pair is not None
        first, second = pair
        first.wait_serving(launch=1)
        second.wait_serving(launch=1)
        healthy = [each.history()["launches"][0] for each in (first, second)]
        assert healthy[0]["started_at"] < healthy[1]["started_at"]
        assert six_gib.oom_kills == 0
        for each in boxes:
            each.signal(signal.SIGTERM)
            assert each.exit_code(END) == 0
