"""Faults on demand: each one is what a supervisor would see of the real thing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulated_engine import CAPTURES, Engine, await_condition, card_in, frames_of, neighbour
from supervisord_vllm.simulation.memory import read_memory
from supervisord_vllm.simulation.quantity import GIB

EAGER = ("--enforce-eager", "--max-model-len", "8192", "--max-num-seqs", "16", "--gpu-memory-utilization", "0.5")
GRAPHS = ("--max-model-len", "8192", "--max-num-seqs", "16", "--gpu-memory-utilization", "0.5")


@pytest.fixture
def card(tmp_path: Path) -> Iterator[Path]:
    with card_in(tmp_path) as state:
        yield state


@pytest.mark.parametrize(
    ("stage", "frame"),
    [
        ("loading", "create_weights"),
        ("profiling", "profile_run"),
        ("kv-alloc", "_allocate_kv_cache"),
        ("capture", "capture_model"),
        ("warm-up", "_dummy_sampler_run"),
    ],
)
def test_out_of_memory_in_a_stage_has_that_stages_frames(card: Path, stage: str, frame: str) -> None:
    engine = Engine(card, *GRAPHS, faults=f"oom at={stage} launch=1")
    assert engine.exit_code() == 1
    text = engine.text()
    assert "EngineCore failed to start." in text
    assert frame in frames_of(text)
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate " in text
    sampler = "RuntimeError: CUDA out of memory occurred when warming up sampler with 16 dummy requests." in text
    assert sampler is (stage == "warm-up")


def test_a_runtime_out_of_memory_ends_like_the_capture_with_exit_0(card: Path) -> None:
    engine = Engine(card, *EAGER, faults="oom at=running after-requests=2").ready()
    try:
        assert engine.complete()[0] == 200
        status, body = engine.complete()
        assert status == 500
        assert "EngineCore encountered an issue." in body
        assert engine.exit_code() == 0
    finally:
        engine.stop()
    text = engine.text()
    real = next(CAPTURES.glob("08-*.log")).read_text()
    place = text.index("Dumping input data for V1 LLM engine (v0.26.0) with config: model=")
    assert place < text.index("EngineCore encountered a fatal error.") < text.index("AsyncLLM output_handler failed.")
    assert frames_of(text)[:14] == frames_of(real)[:14]
    assert "Tried to allocate 110.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 41.56 MiB is free." in text
    assert read_memory(card).holders == ()


def test_a_neighbour_that_takes_the_rest_makes_a_long_prompt_run_out_of_memory(card: Path) -> None:
    engine = Engine(card, *EAGER).ready()
    try:
        left = read_memory(card).free - 96 * (1 << 20)
        with neighbour(card, f"{left}B"):
            assert engine.request("/v1/completions", {"prompt": [1] * 8000, "max_tokens": 2})[0] == 500
            assert engine.exit_code() == 0
    finally:
        engine.stop()
    assert "Tried to allocate 54.69 MiB" in engine.text()


def test_a_stream_in_flight_ends_with_an_error_event_when_the_engine_dies(card: Path) -> None:
    engine = Engine(card, *EAGER, faults="unknown at=running after-requests=2").ready()
    answers: list[tuple[int | None, str]] = []
    stream = {"prompt": "a", "max_tokens": 8000, "stream": True}
    client = threading.Thread(target=lambda: answers.append(engine.request("/v1/completions", stream)))
    try:
        client.start()
        await_condition(lambda: "generation_tokens_total" in engine.request("/metrics")[1], "metrics")
        await_condition(
            lambda: 'running{engine="0",model_name="Qwen/Qwen2.5-7B-Instruct"} 1.0' in page(engine), "running"
        )
        assert engine.complete()[0] == 500
        client.join(60)
        assert answers[0][0] == 200
        assert '"type": "InternalServerError"' in answers[0][1]
        assert engine.exit_code() == 0
    finally:
        engine.stop()
    assert "RuntimeError: page table epoch 41 precedes 42" in engine.text()


def page(engine: Engine) -> str:
    return engine.request("/metrics")[1]


def test_death_in_service_is_silent_and_exits_with_0_but_1_in_the_start(card: Path) -> None:
    faults = "die at=profiling launch=1; die at=running launch=2 after=10ms"
    first = Engine(card, *EAGER, faults=faults)
    assert first.exit_code() == 1
    assert "Error:" not in first.text().replace("RuntimeError: Engine core initialization failed.", "")
    second = Engine(card, *EAGER, faults=faults)
    assert second.exit_code() == 0
    assert "fatal error" not in second.text()


@pytest.mark.parametrize(("stage", "code"), [("importing", 0), ("loading", 0), ("running", 7)])
def test_a_silent_exit_takes_the_whole_tree(card: Path, stage: str, code: int) -> None:
    after = " after=0s" if stage == "running" else ""
    engine = Engine(card, *EAGER, faults=f"exit at={stage} code={code}{after}")
    assert engine.exit_code() == code
    assert "Error" not in engine.text()
    assert read_memory(card).holders == ()


def test_a_hang_keeps_health_at_200_and_makes_no_progress(card: Path) -> None:
    engine = Engine(card, *EAGER, faults="hang at=running after-requests=2").ready()
    try:
        assert engine.complete()[0] == 200
        client = threading.Thread(target=engine.complete)
        client.start()
        client.join(0.4)
        assert client.is_alive()
        assert engine.health() == 200
        engine.process.terminate()
        assert engine.exit_code() == 0
        client.join(60)
    finally:
        engine.stop()


def test_a_wedged_start_prints_nothing_more_and_ends_when_it_is_killed(card: Path) -> None:
    engine = Engine(card, *EAGER, faults="hang at=loading")
    try:
        engine.await_text("Using V2 Model Runner")
        await_condition(lambda: engine.core() > 0, "core")
        os.killpg(engine.process.pid, signal.SIGKILL)
        assert engine.exit_code() == -9
        await_condition(lambda: read_memory(card).holders == (), "memory")
    finally:
        engine.stop()


def test_term_during_the_start_is_an_interrupt_or_swallowed(card: Path) -> None:
    faults = "hang at=loading; swallow-term launch=2"
    engine = Engine(card, *EAGER, faults=faults)
    try:
        engine.await_text("Using V2 Model Runner")
        engine.process.terminate()
        assert engine.exit_code() == -signal.SIGINT
        assert "KeyboardInterrupt: terminated" in engine.text()
        await_condition(lambda: read_memory(card).holders == (), "memory")
    finally:
        engine.stop()
    engine = Engine(card, *EAGER, faults=faults)
    try:
        engine.await_text("Using V2 Model Runner")
        engine.process.terminate()
        engine.process.send_signal(signal.SIGINT)
        assert engine.exit_code() == -signal.SIGINT
        assert engine.text().count("KeyboardInterrupt") == 1
    finally:
        engine.stop()


def test_an_engine_that_ignores_term_needs_a_kill(card: Path) -> None:
    engine = Engine(card, *EAGER, faults="ignore-term").ready()
    try:
        engine.process.terminate()
        engine.process.send_signal(signal.SIGINT)
        assert engine.complete()[0] == 200
        assert engine.process.poll() is None
    finally:
        engine.stop()


def test_term_with_an_open_stream_ends_at_once_or_hangs_until_a_second_term(card: Path) -> None:
    for faults in ("", "term-hang"):
        engine = Engine(card, *EAGER, faults=faults).ready()
        stream = {"prompt": "a", "max_tokens": 8000, "stream": True}
        client = threading.Thread(target=lambda: engine.request("/v1/completions", stream))  # noqa: B023
        try:
            client.start()
            await_condition(lambda: "1.0" in running(engine), "running")  # noqa: B023
            engine.process.terminate()
            if faults:
                engine.await_text("Waiting for connections to close.")
                assert engine.process.poll() is None
                assert read_memory(card).holders == ()
                engine.process.terminate()
            assert engine.exit_code() == 0
        finally:
            engine.stop()
        client.join(60)


def running(engine: Engine) -> str:
    lines = page(engine).splitlines()
    return next((line for line in lines if line.startswith("vllm:num_requests_running{")), "")


def test_a_neighbour_that_comes_after_the_gates_last_look_makes_the_first_launch_fail(card: Path) -> None:
    faults = "neighbour-takes bytes=40GiB launch=1"
    engine = Engine(card, *EAGER, "--gpu-memory-utilization", "0.9", faults=faults)
    assert engine.exit_code() == 1
    assert "Free memory on device cuda:0 (99.29/139.8 GiB) on startup is less than desired" in engine.text()
    holder = read_memory(card).holders[0]
    assert (holder.bytes, holder.command) == (40 * GIB, "python")
    assert b"SUPERVISE_" not in Path(f"/proc/{holder.pid}/environ").read_bytes()
    os.kill(holder.pid, signal.SIGTERM)
    await_condition(lambda: read_memory(card).holders == (), "neighbour's end")


def test_an_announced_neighbour_is_waited_for(card: Path) -> None:
    with neighbour(card, "40GiB", "--when", "launch=1", "--name", "train.py"):
        engine = Engine(card, *EAGER, "--gpu-memory-utilization", "0.9", faults="await-neighbour bytes=40GiB launch=1")
        assert engine.exit_code() == 1
        assert read_memory(card).holders[0].command == "train.py"


def test_a_neighbour_that_grows_between_profile_and_allocation_is_named_in_torchs_message(card: Path) -> None:
    faults = "neighbour-takes bytes=80GiB at=kv-alloc"
    engine = Engine(card, *EAGER, faults=faults)
    assert engine.exit_code() == 1
    assert "_allocate_kv_cache" in frames_of(engine.text())
    assert "has 80.00 GiB memory in use." in engine.text()


def test_missing_model_and_slow_start_on_demand(card: Path) -> None:
    engine = Engine(card, *EAGER, faults="missing-model launch=1; slow-start factor=100 launch=2")
    assert engine.exit_code() == 1
    assert "is not a valid model identifier" in engine.text()
    slow = Engine(card, *EAGER, faults="missing-model launch=1; slow-start factor=100 launch=2").ready()
    slow.stop()


def test_a_wrong_fault_variable_is_refused_in_one_line(card: Path) -> None:
    engine = Engine(card, faults="meteor")
    assert engine.exit_code() == 2
    assert engine.text().startswith("simulation: SIMULATED_FAULTS 'meteor': kind 'meteor' is unknown")
    assert engine.text().count("\n") == 1
