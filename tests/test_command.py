from __future__ import annotations

from pathlib import Path

import pytest

from supervisord_vllm.config import Engine
from supervisord_vllm.core.levers import Levers, LeverValue, Weights
from supervisord_vllm.engine.command import command_line, engine_environment, executable

ENGINE = Engine(("vllm", "serve"), "m", ("--dtype", "half"), 8000, "http://127.0.0.1:8000")


def test_the_order_is_command_model_address_levers_arguments() -> None:
    engine = Engine(("/opt/v/vllm", "serve"), "m", ("--dtype", "half"), 81, "", host="::1", quantization="awq")
    levers = Levers({"max_num_seqs": 16, "gpu_memory_utilization": 572, "weights": Weights("small", "gptq")})
    assert command_line(engine, levers) == [
        *("/opt/v/vllm", "serve", "small", "--host", "::1", "--port", "81"),
        *("--gpu-memory-utilization", "0.572", "--max-num-seqs", "16", "--quantization", "gptq", "--dtype", "half"),
    ]


def test_without_weights_the_declared_model_and_its_quantization_are_served() -> None:
    engine = Engine(("v",), "m", (), 1, "", quantization="awq")
    assert command_line(engine, Levers()) == ["v", "m", "--port", "1", "--quantization", "awq"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("gpu_memory_utilization", 900, ["--gpu-memory-utilization", "0.9"]),
        ("gpu_memory_utilization", 1000, ["--gpu-memory-utilization", "1"]),
        ("gpu_memory_utilization", 5, ["--gpu-memory-utilization", "0.005"]),
        ("gpu_memory_utilization", 850, ["--gpu-memory-utilization", "0.85"]),
        ("enforce_eager", True, ["--enforce-eager"]),
        ("enforce_eager", False, []),
        ("kv_cache_dtype", "fp8", ["--kv-cache-dtype", "fp8"]),
        ("max_model_len", 8192, ["--max-model-len", "8192"]),
    ],
)
def test_a_lever_is_written_as_vllm_reads_it(name: str, value: LeverValue, words: list[str]) -> None:
    assert command_line(ENGINE, Levers({name: value})) == [
        "vllm",
        "serve",
        "m",
        "--port",
        "8000",
        *words,
        "--dtype",
        "half",
    ]


def test_every_utilization_of_the_grid_is_read_back_exactly() -> None:
    for per_mille in range(1, 1001):
        text = command_line(ENGINE, Levers({"gpu_memory_utilization": per_mille}))[6]
        assert round(float(text) * 1000) == per_mille
        assert len(text) <= len("0.572")


def test_what_is_meant_for_the_supervisor_does_not_reach_the_engine() -> None:
    base = {
        "PATH": "/bin",
        "HOME": "/h",
        "NOTIFY_SOCKET": "/n",
        "WATCHDOG_USEC": "1",
        "WATCHDOG_PID": "1",
        "LISTEN_FDS": "1",
        "LISTEN_FDNAMES": "x",
        "SUPERVISE_ENGINE__PORT": "1",
        "SUPERVISE_LAUNCH": "another daemon's",
        "SPT_NOENV": "",
    }
    assert engine_environment(ENGINE, base, "abc.1") == {
        "PATH": "/bin",
        "HOME": "/h",
        "NO_COLOR": "1",
        "SPT_NOENV": "1",
        "SUPERVISE_LAUNCH": "abc.1",
    }


def test_the_operator_s_variables_win_over_ours_but_not_over_the_marker() -> None:
    engine = Engine(("v",), "m", (), 1, "", env={"NO_COLOR": "", "HOME": "/data", "VLLM_API_KEY": "own"}, api_key="own")
    env = engine_environment(engine, {"HOME": "/h"}, "abc.1")
    assert env == {
        "HOME": "/data",
        "NO_COLOR": "",
        "VLLM_API_KEY": "own",
        "SPT_NOENV": "1",
        "SUPERVISE_LAUNCH": "abc.1",
    }


def test_the_key_from_a_file_is_given_as_a_variable_and_never_on_the_command_line() -> None:
    engine = Engine(("v",), "m", (), 1, "", api_key="secret", api_key_file=Path("/k"))
    assert engine_environment(engine, {}, "x")["VLLM_API_KEY"] == "secret"
    assert "secret" not in command_line(engine, Levers())


def test_the_program_is_found_as_it_will_be_executed(tmp_path: Path) -> None:
    program = tmp_path / "bin/vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    bare = Engine(("vllm",), "m", (), 1, "")
    assert executable(bare, {"PATH": str(program.parent)}) is None, "not executable"
    program.chmod(0o755)
    assert executable(bare, {"PATH": str(program.parent)}) == str(program)
    assert executable(bare, {"PATH": "/nowhere"}) is None
    assert executable(
        Engine(("vllm",), "m", (), 1, "", env={"PATH": str(program.parent)}), {"PATH": "/nowhere"}
    ) == str(program)
    inside = Engine(("bin/vllm",), "m", (), 1, "", working_dir=tmp_path)
    assert executable(inside, {}) == str(program)
    assert executable(Engine((str(tmp_path),), "m", (), 1, ""), {}) is None, "a folder is no program"
