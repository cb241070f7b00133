"""The main job on real vLLM: it comes up although what was declared does not fit, comes back when it dies, says why."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import urllib.error

import pytest

from real.cage import GIB, Cage
from real.policies import policy
from real.sandbox import END, START, Json, Sandbox
from real.vllm_cpu.install import VllmCpu
from real.waiting import until

pytestmark = pytest.mark.real

UTILIZATION = "gpu_memory_utilization"
GIVEN_UP = 69
RESERVE_GIB = 150 / 1024
"""What the ledger's arithmetic keeps free beside a computed utilization."""
SMALL_KV = ("--kv-cache-memory-bytes", "64M")
"""Keeps an engine small where its memory is not what is tested; it switches the utilization off."""


def flag(argv: list[str], name: str) -> str:
    """The value of a flag on a command line."""
    return argv[argv.index(name) + 1]


def only_move(decision: Json) -> Json:
    """The one lever that a decision moves."""
    (move,) = decision["moves"]
    assert isinstance(move, dict)
    return move


def decisions_of(history: Json, launch: int) -> list[Json]:
    """What was decided about one launch."""
    return [decision for decision in history["decisions"] if decision["launch"] == launch]


def one_line(text: str) -> str:
    """Text without the line breaks that the width of a terminal put into it."""
    return " ".join(text.split())


def engine_said(box: Sandbox, launch: int, pattern: str) -> re.Match[str]:
    """What vLLM itself printed in a launch."""
    found = re.search(pattern, box.log(launch))
    assert found, f"launch {launch} did not print {pattern}"
    return found


# 1 -- a length that the KV cache cannot hold


def test_a_length_above_the_kv_cache_is_cut_to_vllms_own_estimate(vllm: VllmCpu, box: Sandbox) -> None:
    levers = {"max-model-len": 4096}
    ladder = [{"lever": "max-model-len", "min": 256}]
    box.start(policy(box, vllm, levers=levers, ladder=ladder, args=["--kv-cache-memory-bytes", "1M"]))
    status = box.wait_serving(launch=2, seconds=2 * START)

    estimate = int(engine_said(box, 1, r"estimated maximum model length is (\d+)")[1])
    length = status["launch"]["levers"]["max_model_len"]
    assert estimate - 128 < length <= estimate, "the estimate, down to the block"
    assert flag(status["launch"]["argv"], "--max-model-len") == str(length)
    assert status["declared"]["max_model_len"] == 4096
    assert status["ready"]

    answer = box.engine.chat()
    assert answer["usage"]["completion_tokens"] > 0
    assert isinstance(answer["choices"][0]["message"]["content"], str)

    history = box.history()
    assert [launch["number"] for launch in history["launches"]] == [1, 2]
    (decision,) = decisions_of(history, 1)
    assert (decision["kind"], decision["action"]) == ("kv_len_too_long", "next_config")
    move = only_move(decision)
    assert (move["lever"], move["from"], move["to"]) == ("max_model_len", 4096, length)
    assert (move["direction"], move["how"]) == ("down", "computed")
    assert str(estimate) in " ".join(evidence["text"] for evidence in decision["evidence"])
    assert f"4,096 → {length:,}" in decision["sentence"]
    assert decision["sentence"] in one_line(box.cli("explain"))
    assert "serving" in box.cli("status")
    assert box.exit_fact(1)["code"] == 1


# 2 -- memory, in a cage of 6 GiB


def memory_policy(box: Sandbox, vllm: VllmCpu) -> str:
    """0.70 of 6 GiB opens alone and is refused beside a neighbour of 2 GiB."""
    levers = {"gpu-memory-utilization": 0.70, "max-model-len": 512}
    return policy(
        box, vllm, levers=levers, ladder=[{"lever": "gpu-memory-utilization", "step": 0.05, "min": 0.30, "max": 0.95}]
    )


def test_memory_taken_after_the_gate_is_answered_with_the_fraction_that_fits(
    vllm: VllmCpu, six_gib: Cage, box: Sandbox
) -> None:
    box.start(memory_policy(box, vllm), wrap=six_gib.command)
    box.wait(lambda status: status["state"] == "starting", START, "launch 1 to start")
    with six_gib.neighbour(2 * GIB) as neighbour:
        status = box.wait_serving(launch=2, seconds=2 * START)

        said = engine_said(
            box, 1, r"Available memory on node \d+ \(([\d.]+)/6\.0 GiB\) on startup is less than desired"
        )
        free_gib = float(said[1])
        fraction = status["launch"]["levers"][UTILIZATION]
        assert fraction * 6 + RESERVE_GIB <= free_gib + 0.01, "it fits into what vLLM saw as free"
        assert fraction * 6 + RESERVE_GIB >= free_gib - 0.6, "and wastes no more than the guess at vLLM's own imports"
        assert float(flag(status["launch"]["argv"], "--gpu-memory-utilization")) == fraction
        assert box.engine.complete()["usage"]["completion_tokens"] == 4

        waited, moved = box.history()["decisions"]
        assert (waited["kind"], waited["launch"]) == ("gpu_busy_foreign", 1)
        assert (waited["action"], waited["moves"]) == ("wait_vram_then_retry_same", []), "a neighbour may leave again"
        assert (moved["kind"], moved["action"]) == ("gpu_busy_foreign", "next_config")
        move = only_move(moved)
        assert (move["lever"], move["from"], move["to"]) == (UTILIZATION, 0.7, fraction)
        assert (move["direction"], move["how"]) == ("down", "computed")
        assert f"0.700 → {fraction:.3f}" in moved["sentence"]
        for decision in (waited, moved):
            assert f"pid {neighbour.pid}" in decision["sentence"], "the holder is named"
        assert six_gib.oom_kills == 0


def test_a_neighbour_present_at_the_gate_is_fitted_beside_at_the_first_launch(
    vllm: VllmCpu, six_gib: Cage, box: Sandbox
) -> None:
    with six_gib.neighbour(2 * GIB):
        box.start(memory_policy(box, vllm), wrap=six_gib.command)
        status = box.wait_serving(launch=1)

        fraction = status["launch"]["levers"][UTILIZATION]
        assert 0.40 < fraction < 0.60
        assert status["declared"][UTILIZATION] == 0.7
        assert box.engine.complete()["usage"]["completion_tokens"] == 4

        history = box.history()
        assert len(history["launches"]) == 1
        moves = [move for decision in history["decisions"] for move in decision["moves"]]
        assert [(move["lever"], move["from"], move["to"]) for move in moves] == [(UTILIZATION, 0.7, fraction)]
        assert six_gib.oom_kills == 0


# 3 -- what no configuration can cure


@pytest.mark.parametrize(
    ("args", "model", "sentence", "code"),
    [
        (["--no-such-flag"], None, "unrecognized arguments: --no-such-flag", 2),
        ([], "/nonexistent/no-such-model", "Repo id must be in the form", 1),
    ],
    ids=["unknown-flag", "missing-model"],
)
def test_a_mistake_ends_after_one_launch_with_vllms_own_sentence(
    vllm: VllmCpu, box: Sandbox, args: list[str], model: str | None, sentence: str, code: int
) -> None:
    levers = {"max-model-len": 512}
    box.start(policy(box, vllm, levers=levers, model=model, args=[*SMALL_KV, *args]))
    assert box.exit_code(2 * START) == GIVEN_UP

    history = box.history()
    assert len(history["launches"]) == 1
    (decision,) = history["decisions"]
    assert decision["action"] == "stop_explain"
    assert decision["moves"] == []
    assert sentence in " ".join([decision["sentence"], *(evidence["text"] for evidence in decision["evidence"])])
    assert sentence in one_line(box.cli("explain"))
    assert sentence in (box.root / "err").read_text(encoding="utf-8"), "an operator reads it in the journal"
    assert box.exit_fact(1)["code"] == code


# 4 -- death while serving


def test_a_killed_engine_core_exits_zero_and_the_same_configuration_comes_back(vllm: VllmCpu, box: Sandbox) -> None:
    text = policy(
        box,
        vllm,
        levers={"max-model-len": 2048},
        ladder=[{"lever": "max-model-len", "min": 256}],
        args=SMALL_KV,
        env={"VLLMTEST_STEP_MS": "50"},
        worker=True,
        fork=False,
    )
    box.start(text)
    before = box.wait_serving(launch=1)

    ours = {process.comm: process for process in box.live()}
    core, worker = ours["VLLM::EngineCor"], ours["VLLM::Worker"]
    markers = {process.environ["SUPERVISE_LAUNCH"] for process in ours.values()}
    assert len(markers) == 1, "API server, EngineCore and Worker carry the marker of one launch"
    assert re.fullmatch(rf"{box.instance}\.[0-9a-f-]{{32,36}}", markers.pop())

    with box.engine.stream(max_tokens=1500) as stream:
        os.kill(core.pid, signal.SIGKILL)
        assert b'"finish_reason":"length"' not in stream.rest(), "the request was running"
    after = box.wait_serving(launch=2, seconds=2 * START)

    assert box.exit_fact(1)["code"] == 0, "vLLM calls its own death a success"
    assert after["launch"]["levers"] == before["launch"]["levers"]
    assert after["launch"]["pid"] != before["launch"]["pid"]
    assert not {core.pid, worker.pid} & {process.pid for process in box.live()}
    assert box.engine.complete()["usage"]["completion_tokens"] == 4

    decision = decisions_of(box.history(), 1)[-1]
    assert decision["kind"] in {"engine_dead", "worker_died"}
    assert decision["action"] in {"restart_same", "kill_tree_then_restart_same"}
    assert decision["moves"] == []


# 5 -- out of memory while serving


def test_running_out_of_memory_in_a_step_lowers_the_utilization_and_serves(
    vllm: VllmCpu, six_gib: Cage, box: Sandbox
) -> None:
    """In the cage, where no other program of this machine can be the neighbour that is to blame."""
    text = policy(
        box,
        vllm,
        levers={"gpu-memory-utilization": 0.50, "max-model-len": 512},
        ladder=[{"lever": "gpu-memory-utilization", "step": 0.05, "min": 0.30, "max": 0.70}],
        env={"VLLMTEST_FAULT": "oom_step:40", "VLLMTEST_FAULT_ONCE": str(box.root / "fault-fired")},
    )
    box.start(text, wrap=six_gib.command)
    box.wait_serving(launch=1)
    assert not (box.root / "fault-fired").exists(), "proving took fewer steps than the fault waits for"
    with contextlib.suppress(urllib.error.HTTPError, OSError):
        box.engine.complete(max_tokens=100)
    assert (box.root / "fault-fired").exists()

    status = box.wait_serving(launch=2, seconds=2 * START)
    engine_said(box, 1, r"OutOfMemoryError: CUDA out of memory\. Tried to allocate 20\.00 MiB")
    assert box.exit_fact(1)["code"] == 0
    fraction = status["launch"]["levers"][UTILIZATION]
    assert fraction == pytest.approx(0.45), "at least a step; 20 MiB and the reserve are less than one"
    assert box.engine.complete(max_tokens=100)["usage"]["completion_tokens"] == 100

    decision = decisions_of(box.history(), 1)[-1]
    assert decision["kind"] == "oom_runtime"
    move = only_move(decision)
    assert (move["lever"], move["from"], move["to"]) == (UTILIZATION, 0.50, fraction)
    assert "0.500 → 0.450" in decision["sentence"]


# 6 -- the end


def test_sigterm_while_a_response_streams_ends_everything(vllm: VllmCpu, box: Sandbox) -> None:
    text = policy(box, vllm, levers={"max-model-len": 2048}, args=SMALL_KV, env={"VLLMTEST_STEP_MS": "100"}, fork=False)
    box.start(text)
    box.wait_serving(launch=1)
    with box.engine.stream(max_tokens=1500):  # two and a half minutes, with a client that does not hang up
        box.signal(signal.SIGTERM)
        assert box.exit_code(END) == 0
    assert box.left() == []


def test_sigterm_during_start_up_ends_everything(vllm: VllmCpu, box: Sandbox) -> None:
    box.start(policy(box, vllm, levers={"max-model-len": 512}, args=SMALL_KV, fork=False))
    # From here on until it serves, vLLM alone swallows a SIGTERM and comes up.
    until(lambda: "Initializing a V1 LLM engine" in box.log(1), START, lambda: f"the engine's start\n{box.report()}")
    box.signal(signal.SIGTERM)
    assert box.exit_code(END) == 0
    assert box.left() == []
