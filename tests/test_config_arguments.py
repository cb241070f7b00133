from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervisord_vllm.config import ConfigError, arguments, load
from supervisord_vllm.core.levers import LEVERS

LADDER = '[[ladder]]\nlever = "gpu-memory-utilization"\nmin = 0.5\nmax = 0.9\n'
WEIGHTS = '[[ladder]]\nlever = "weights"\nuse = ["other"]\n'


def problems(tmp_path: Path, args: list[str], rest: str = "", engine: str = "") -> list[str]:
    path = tmp_path / "q.toml"
    path.write_text(f'schema = 1\n[engine]\nmodel = "m"\nargs = {json.dumps(args)}\n{engine}\n{rest}')
    try:
        load(path, environ={"HOME": "/"})
    except ConfigError as error:
        return [problem.removeprefix(f"{path}:") for problem in error.problems]
    return []


@pytest.mark.parametrize(
    "word",
    [
        "--gpu-memory-utilization",
        "--gpu-memory-utilization=0.9",
        "--gpu_memory_utilization=0.9",
        "--gpu_memory-utilization",
        "--gpu-mem-util",
        "--gpu-m=0.9",
        "--gpu",
        "--device-memory-utilization",
        "--device_mem",
    ],
)
def test_the_utilization_is_seen_in_every_spelling(tmp_path: Path, word: str) -> None:
    (problem,) = problems(tmp_path, ["--dtype", "half", word, "0.9"])
    spelling = word.partition("=")[0]
    assert problem == (
        f"4: engine.args[2]: {spelling} is a lever (a knob that the policy may move); "
        "write gpu-memory-utilization under [levers] instead"
    )


@pytest.mark.parametrize("name", [name for name, spec in LEVERS.items() if spec.flag])
def test_every_lever_is_refused_in_args_whether_it_may_move_or_not(tmp_path: Path, name: str) -> None:
    flag = LEVERS[name].flag or ""
    for word in (flag, f"{flag}=1", flag.replace("-", "_").replace("__", "--", 1), flag[:-1]):
        assert arguments.meaning(word) == name, word
        assert f"write {name.replace('_', '-')} under [levers]" in problems(tmp_path, [word])[0]


@pytest.mark.parametrize(
    ("args", "fix"),
    [
        (["--no-enforce-eager"], "write enforce-eager under [levers]"),
        (["--no-enforce-e"], "write enforce-eager under [levers]"),
        (["--compilation-config.max_cudagraph_capture_size", "8"], "write max-cudagraph-capture-size under [levers]"),
        (["-cc", '{"max_cudagraph_capture_size": 8}'], "write max-cudagraph-capture-size under [levers]"),
        (["--compilation_conf={'max_cudagraph_capture_size': 8}"], "write max-cudagraph-capture-size under [levers]"),
        (["--port", "8001"], "write port under [engine]"),
        (["--por=8001"], "write port under [engine]"),
        (["--host=::"], "write host under [engine]"),
        (["--model", "x"], "write model under [engine]"),
    ],
)
def test_what_belongs_elsewhere_names_where(tmp_path: Path, args: list[str], fix: str) -> None:
    assert fix in problems(tmp_path, args)[0]


@pytest.mark.parametrize("word", ["-q", "-qawq", "--quantization=awq", "--quant", "--quantizatio"])
def test_a_quantization_may_stay_unless_the_weights_may_move(tmp_path: Path, word: str) -> None:
    assert problems(tmp_path, [word]) == []
    assert "write quantization under [engine]" in problems(tmp_path, [word], WEIGHTS)[0]
    assert "write quantization under [engine]" in problems(tmp_path, [word], engine='quantization = "fp8"')[0]


@pytest.mark.parametrize("word", ["--kv-cache-memory-bytes", "--kv_cache_memory_bytes=64M", "--kv-cache-mem"])
def test_kv_cache_bytes_may_stay_unless_the_utilization_may_move(tmp_path: Path, word: str) -> None:
    assert problems(tmp_path, [word, "64M"]) == []
    assert problems(tmp_path, [word, "64M"], "[levers]\ngpu-memory-utilization = 0.9\n") == []
    assert "switches the utilization off" in problems(tmp_path, [word, "64M"], LADDER)[0]
    assert "fixes the KV cache" in problems(tmp_path, [], LADDER, 'env = { VLLM_CPU_KVCACHE_SPACE = "4" }')[0]


def test_what_is_no_lever_may_stay(tmp_path: Path) -> None:
    words = [
        *("--served-model-name", "a", "b", "--dtype=float32", "-tp", "2", "-O3", "--device", "cpu", "--seed", "0"),
        *(
            "--kv-cache-dtype-skip-layers",
            "1",
            "--quantization-config",
            "{}",
            "--model-impl",
            "auto",
            "--max-logprobs",
            "5",
        ),
        *(
            "--enable-prefix-caching",
            "--hf-overrides",
            "{}",
            "--compilation-config",
            '{"cudagraph_mode": "NONE"}',
            "--",
        ),
        *("--max-num-active-seqs", "4", "--kv-cache-metrics", "--chat-template", "gpu-memory-utilization"),
    ]
    assert problems(tmp_path, words, LADDER + WEIGHTS) == []


@pytest.mark.parametrize(
    ("yaml", "line"),
    [
        ("port: 8000\n", 1),
        ("# gpu-memory-utilization: 1\nserved-model-name: x\ngpu_memory_utilization: 0.9\n", 3),
        ('"max-model-len": 4096\n', 1),
        ("max-model: 4096\n", 1),
        ("{a: 1, max-num-seqs: 4}\n", 1),
        ("compilation-config:\n  max_cudagraph_capture_size: 8\n", 2),
    ],
)
def test_a_lever_behind_vllm_s_own_yaml_is_seen(tmp_path: Path, yaml: str, line: int) -> None:
    (tmp_path / "v.yaml").write_text(yaml)
    for args in (["--config", "v.yaml"], ["--config=v.yaml"]):
        (problem,) = problems(tmp_path, args, engine=f'working-dir = "{tmp_path}"')
        assert problem.startswith(f"4: engine.args: {tmp_path}/v.yaml:{line}: ")
        assert problem.endswith(" instead")


def test_a_yaml_without_levers_is_good_and_a_missing_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text(
        "served-model-name: x # max-num-seqs: 4\nkv-transfer-config:\n  port: 5\n  host: x\n"
    )
    assert problems(tmp_path, ["--config", str(tmp_path / "v.yaml")]) == []
    assert "none.yaml: cannot be read" in problems(tmp_path, ["--config", str(tmp_path / "none.yaml")])[0]


@pytest.mark.parametrize(
    "command",
    [
        ["docker", "run", "vllm"],
        ["/usr/bin/podman", "run"],
        ["ssh", "gpu7", "vllm", "serve"],
        ["/opt/slurm/bin/srun", "vllm", "serve"],
        ["sudo", "-E", "docker", "run"],
        ["env", "A=b", "/usr/bin/ssh", "host"],
    ],
)
def test_a_command_that_starts_the_engine_elsewhere_is_refused(tmp_path: Path, command: list[str]) -> None:
    (problem,) = problems(tmp_path, [], engine=f"command = {json.dumps(command)}")
    assert "starts the engine out of our reach" in problem
    assert problem.startswith("5: engine.command[")


def test_an_interpreter_s_own_words_are_no_levers_but_flags_in_the_command_are(tmp_path: Path) -> None:
    assert problems(tmp_path, [], WEIGHTS, 'command = ["python", "-q", "-m", "x", "serve"]') == []
    assert "is a lever" in problems(tmp_path, [], engine='command = ["vllm", "serve", "--max-num-seqs=4"]')[0]


def test_warnings_name_what_is_allowed_but_unwise(tmp_path: Path) -> None:
    path = tmp_path / "q.toml"
    path.write_text(
        'schema = 1\n[engine]\nmodel = "m"\nargs = ["--api-key", "abcdef-key", "--ssl-certfile", "x"]\n'
        'env = { VLLM_KEEP_ALIVE_ON_ENGINE_DEATH = "1" }\n[levers]\nenforce-eager = true\n'
        '[[ladder]]\nlever = "enforce-eager"\n'
        "[policy.oom-runtime]\nremedies = ['max-num-seqs']\n"
    )
    settings = load(path, environ={"HOME": "/"})
    text = "\n".join(settings.warnings)
    for words in ("seen by every user", "speaks TLS", "keeps a dead", "is declared", "max-num-seqs has no rung"):
        assert words in text
    assert "abcdef-key" not in text
    assert "abcdef-key" in settings.secrets
    assert all(warning.startswith(f"{path}:") for warning in settings.warnings)
