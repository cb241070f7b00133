"""The stand-in engine as a process: vLLM's lines and exit codes, its endpoints, its process tree."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulated_engine import CAPTURES, LARGE, MODEL, Engine, await_condition, card_in, frames_of, neighbour, shape
from supervisord_vllm.simulation.arguments import human_readable_int, parse
from supervisord_vllm.simulation.card import read_card
from supervisord_vllm.simulation.console import Console
from supervisord_vllm.simulation.memory import read_memory
from supervisord_vllm.simulation.resolve import RefusedError, find_model, resolve
from supervisord_vllm.simulation.shared_card import SharedCard

SEED = ("--served-model-name", "m", "--load-format", "dummy", "--max-model-len", "8192", "--max-num-seqs", "16")
EAGER = ("--enforce-eager", "--max-model-len", "8192", "--max-num-seqs", "16", "--gpu-memory-utilization", "0.5")


@pytest.fixture
def card(tmp_path: Path) -> Iterator[Path]:
    with card_in(tmp_path) as state:
        yield state


def captured(number: str) -> str:
    return next(CAPTURES.glob(f"{number}-*.log")).read_text(encoding="utf-8")


def flags_of(number: str) -> list[str]:
    command = json.loads(next(CAPTURES.glob(f"{number}-*.json")).read_text())["cmd"]
    port = command.index("--port")
    return [*command[3:port], *command[port + 2 :]]


def test_a_start_a_few_answers_and_a_stop_print_what_vllm_printed(card: Path) -> None:
    engine = Engine(card, *SEED, "--gpu-memory-utilization", "0.90").ready()
    try:
        memory = read_memory(card)
        used = (memory.usable - memory.free) / (1 << 20)
        assert abs(used - 128475) < 0.1 * 1024  # nvidia-smi when 01 was ready
        assert [holder.command for holder in memory.holders] == ["VLLM::EngineCore"]
        assert Path(f"/proc/{engine.core()}/cmdline").read_bytes().startswith(b"VLLM::EngineCore\0")
        assert b"SIMULATED_CARD=" in Path(f"/proc/{engine.core()}/environ").read_bytes()
        engine.process.terminate()
        assert engine.exit_code() == 0
        assert read_memory(card).holders == ()
    finally:
        engine.stop()
    ours, real = shape(engine.text()), shape(captured("01"))
    wanted = [line for line in real if "resource_tracker" not in line]
    # Two processes write at the end at once: compare what was said, not the interleaving.
    assert sorted(line for line in ours if "Finished server" not in line) == sorted(wanted)
    assert [line for line in ours if "EngineCore" in line] == [line for line in wanted if "EngineCore" in line]
    assert "\rCapturing CUDA graphs (PIECEWISE): 100%|██████████| 7/7" in engine.log.read_bytes().decode()


@pytest.mark.parametrize(
    ("number", "holds", "model"),
    [("04", "41487MiB", MODEL), ("05", "", MODEL), ("06", "", MODEL), ("22", "43157MiB", LARGE), ("24", "", MODEL)],
)
def test_a_start_that_fails_prints_the_captures_lines_frames_and_numbers(
    card: Path, number: str, holds: str, model: str
) -> None:
    if number == "05":  # it ran with a warm compile cache
        first = Engine(card, *flags_of(number), model=model)
        assert first.exit_code() == 1
    if holds:
        with neighbour(card, holds):
            engine = Engine(card, *flags_of(number), model=model)
            assert engine.exit_code() == 1
    else:
        engine = Engine(card, *flags_of(number), model=model)
        assert engine.exit_code() == 1
    ours, real = engine.text(), captured(number)
    assert frames_of(ours) == frames_of(real)
    assert last_error(ours)[0] == last_error(real)[0]
    for our, their in zip(last_error(ours)[1], last_error(real)[1], strict=True):
        assert abs(our - their) <= max(0.02 * their, 0.1), (ours, their)
    quiet = [line for line in shape(ours) if line.startswith("(EngineCore") and "File" not in line]
    assert [kind(line) for line in quiet] == [
        kind(line) for line in shape(real) if line.startswith("(EngineCore") and "File" not in line
    ]
    assert ours.rstrip().endswith("Failed core proc(s): {}")


def kind(line: str) -> str:
    """A line up to what a sentence about several processes may order differently."""
    return re.sub(r"(of which).*", r"\1", re.sub(r"N (KiB|MiB|GiB)", "N", line))


def last_error(text: str) -> tuple[str, list[float]]:
    """Exception class and sizes in GiB of the first error sentence; pids are no sizes."""
    line = next(line for line in text.splitlines() if re.search(r"ERROR .*\] [\w.]*Error: ", line))
    sentence = re.sub(r"Process \d+ has", "Process has", line.split("] ", 1)[1])
    scale = {"GiB": 1.0, "MiB": 1 / 1024, "KiB": 1 / 1024**2}
    found = re.findall(r"([\d.]+) (GiB|MiB|KiB)", sentence)
    return sentence.partition(":")[0], [float(number) * scale[unit] for number, unit in found]


def test_a_second_start_finds_the_compile_cache(card: Path) -> None:
    texts = []
    for _ in range(2):
        engine = Engine(card, *SEED, "--gpu-memory-utilization", "0.1")
        assert engine.exit_code() == 1
        texts.append(engine.text())
    assert "Compiling a graph" in texts[0]
    assert "Directly load the compiled graph(s)" in texts[1]
    assert "Available KV cache memory: -1.69 GiB" in texts[0]
    assert "Available KV cache memory: -1.63 GiB" in texts[1]


def test_an_unknown_flag_ends_with_vllms_usage_error_and_2(card: Path) -> None:
    engine = Engine(card, "--no-such-flag", "1")
    assert engine.exit_code() == 2
    assert engine.text().startswith("usage: vllm [-h] [-v]")
    assert engine.text().endswith("vllm: error: unrecognized arguments: --no-such-flag 1\n")


def test_a_wrong_value_is_refused_in_argparses_words(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["serve", MODEL, "--max-num-seqs", "abc"])
    assert caught.value.code == 2
    usage, error = capfd.readouterr().err.splitlines()
    assert usage == "usage: vllm serve [model_tag] [options]"
    assert error == "vllm serve: error: argument --max-num-seqs: invalid int value: 'abc'"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--max-model-len", "200000"], "User-specified max_model_len (200000) is greater than the derived"),
        (["--max_num_seqs=131072"], "max_num_batched_tokens (8192) must be greater than or equal to max_num_seqs"),
        (["-tp", "2"], "World size (2) is larger than the number of available GPUs (1) in this node."),
        (["--gpu-memory-util", "1.5"], "Input should be less than or equal to 1 [type=less_than_equal"),
        (["--quantization", "awq"], "Cannot find the config file for awq"),
        (["--quantization", "rot13"], "Unknown quantization method: rot13"),
    ],
)
def test_a_configuration_that_vllm_refuses_is_refused_in_its_words(flags: list[str], expected: str) -> None:
    described = read_card("h200")
    with pytest.raises(RefusedError) as caught:
        resolve(described, described.models[MODEL], parse(["serve", MODEL, *flags]), Console("APIServer"))
    assert caught.value.texts[0].startswith("pydantic_core._pydantic_core.ValidationError: 1 validation error for ")
    assert expected in "\n".join(caught.value.texts)


def test_too_many_sequences_print_the_capture(card: Path) -> None:
    engine = Engine(card, *flags_of("12"))
    assert engine.exit_code() == 1
    ours, real = shape(engine.text()), shape(captured("12"))
    assert [line for line in ours if "File" not in line] == [line for line in real if "File" not in line]
    assert frames_of(engine.text(), "APIServer")[-4:] == frames_of(captured("12"), "APIServer")[-4:]


def test_a_model_that_is_not_there_ends_in_the_hubs_sentence(card: Path) -> None:
    engine = Engine(card, model="/models/none")
    assert engine.exit_code() == 1
    assert (
        "HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/none'"
        in engine.text()
    )
    with pytest.raises(RefusedError, match=r"^OSError: some-org/some-model is not a local folder and is not a valid"):
        find_model(read_card("h200"), parse(["serve", "some-org/some-model"]), missing=False)


def test_a_taken_port_is_seen_before_the_engine_starts(card: Path) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        engine = Engine(card, *EAGER, port=owner.getsockname()[1])
        assert engine.exit_code() == 1
    assert engine.text().rstrip().endswith("OSError: [Errno 98] Address already in use")
    assert "EngineCore" not in engine.text()


def test_len_auto_serves_what_fits(card: Path) -> None:
    engine = Engine(card, "--max-model-len", "auto", "--gpu-memory-utilization", "0.135", *("--enforce-eager",)).ready()
    try:
        assert "Auto-fit max_model_len: reduced from 131072 to" in engine.text()
        models = json.loads(engine.request("/v1/models")[1])
        assert models["data"][0]["max_model_len"] < 131072
    finally:
        engine.stop()


def test_the_openai_endpoints_answer_like_vllm(card: Path) -> None:
    engine = Engine(card, *EAGER, "--served-model-name", "m", "n", "--api-key", "secret").ready()
    key = {"Authorization": "Bearer secret"}
    try:
        assert engine.request("/version") == (200, '{"version": "0.26.0"}')
        assert engine.request("/v1/models")[0] == 401
        assert engine.request("/v1/models", headers={"Authorization": "Bearer wrong"})[0] == 401
        models = json.loads(engine.request("/v1/models", headers=key)[1])
        assert [(m["id"], m["root"], m["max_model_len"]) for m in models["data"]] == [
            ("m", MODEL, 8192),
            ("n", MODEL, 8192),
        ]
        status, body = engine.request("/v1/completions", {"model": "m", "prompt": [1] * 20, "max_tokens": 5}, key)
        assert (status, json.loads(body)["usage"]["total_tokens"]) == (200, 25)
        chat = {"model": "n", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = json.loads(engine.request("/v1/chat/completions", chat, key)[1])
        assert answer["choices"][0]["message"]["content"] == " the engine answers"
        streamed = engine.request("/v1/chat/completions", {**chat, "stream": True}, key)[1]
        events = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1]]
        assert "".join(deltas) == " the engine answers"
        status, body = engine.request("/v1/completions", {"model": "x", "prompt": "a"}, key)
        assert (status, json.loads(body)["error"]["type"]) == (404, "NotFoundError")
        status, body = engine.request("/v1/completions", {"prompt": [1] * 8193}, key)
        assert status == 400
        assert "This model's maximum context length is 8192 tokens." in body
        assert engine.request("/v1/completions", {"prompt": "a", "max_tokens": 9000}, key)[0] == 400
    finally:
        engine.stop()


def test_the_metrics_page_has_vllms_series_and_moves_with_requests(card: Path) -> None:
    engine = Engine(card, *EAGER, "--served-model-name", "m").ready()
    try:
        assert engine.complete(max_tokens=7)[0] == 200
        page = engine.request("/metrics")[1]
    finally:
        engine.stop()
    real = next(CAPTURES.glob("01-*.metrics")).read_text()
    labels = '{engine="0",model_name="m"}'
    assert f"vllm:generation_tokens_total{labels} 7.0" in page
    assert f"vllm:num_requests_running{labels} 0.0" in page
    assert f"vllm:time_to_first_token_seconds_count{labels} 1.0" in page
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0' in page
    assert 'kv_cache_size_tokens="1015584"' in page
    for series in re.findall(r"^(vllm:\w+(?:\{[^}]*\})?) ", page, re.MULTILINE):
        if "cache_config_info" not in series and "_tokens_bucket" not in series:
            assert f"\n{series} " in real, series


def test_sigkill_on_the_api_server_leaves_an_orphan_with_its_memory(card: Path) -> None:
    engine = Engine(card, *EAGER).ready()
    core, used = engine.core(), read_memory(card).free
    try:
        engine.process.kill()
        engine.exit_code()
        refused = Engine(card, *EAGER, "--gpu-memory-utilization", "0.9")
        assert refused.exit_code() == 1
        assert "is less than desired GPU memory utilization (0.9, 125.82 GiB)" in refused.text()
        assert read_memory(card).free == used
        os.kill(core, signal.SIGKILL)
        await_condition(lambda: read_memory(card).holders == (), "memory of the orphan")
    finally:
        engine.stop()


def test_when_engine_core_is_killed_health_says_503_and_the_server_exits_with_0(tmp_path: Path) -> None:
    with card_in(tmp_path) as state:
        SharedCard(state).insert('schema = 1\nbase = "h200"\n[timing]\nspeed = 5000\ndeath-window = "2500s"\n')
        engine = Engine(state, *EAGER).ready()
        try:
            os.kill(engine.core(), signal.SIGKILL)
            await_condition(lambda: engine.health() == 503, "503")
            assert engine.exit_code() == 0
        finally:
            engine.stop()
        assert "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup" in engine.text()
        assert "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue." in engine.text()


def test_a_stopped_engine_core_stalls_requests_while_health_says_200(card: Path) -> None:
    engine = Engine(card, *EAGER).ready()
    core = engine.core()
    try:
        os.kill(core, signal.SIGSTOP)
        with socket.create_connection(("127.0.0.1", engine.port)) as client:
            body = b'{"prompt":"a","max_tokens":2}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert engine.health() == 200
            os.kill(core, signal.SIGCONT)
            client.settimeout(60)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        engine.stop()


def test_numbers_for_people_are_read_as_vllm_reads_them() -> None:
    assert [human_readable_int(text) for text in ("8k", "8K", "25.6k", "20G")] == [8000, 8192, 25600, 20 << 30]
    for wrong in ("25.6K", "", "x", "-5"):
        with pytest.raises(ValueError, match=f"^{re.escape(wrong)}$"):
            human_readable_int(wrong)
    options = parse(["serve", "x", "--max_model_len=auto", "--gpu-memory-u", "0.5", "--no-enable-prefix-caching"])
    assert (options.max_model_len, options.gpu_memory_utilization, options.enable_prefix_caching) == (-1, 0.5, False)
