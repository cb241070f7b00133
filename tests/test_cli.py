from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from supervisord_vllm import __version__
from supervisord_vllm.cli.main import PROGRAM, VERBS, app
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.exitcodes import ExitCode

POLICY = """schema = 1
[engine]
model = "m"
args = ["--api-key", "supersecret"]
[levers]
gpu-memory-utilization = 0.9
[[ladder]]
lever = "gpu-memory-utilization"
min = 0.7
[[ladder]]
lever = "enforce-eager"
[[ladder]]
lever = "weights"
use = [{ model = "small", quantization = "awq" }]
"""
ROOT = Path(__file__).parent.parent


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SUPERVISE_", "COLUMNS"))}
    return subprocess.run(
        [sys.executable, "-m", "supervisord_vllm.cli.main", *words],
        env={**env, "COLUMNS": "120", "NO_COLOR": "1", "PYTHONPATH": str(ROOT), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def called(*words: str) -> tuple[int, str]:
    """The same within this process: exit code and everything printed."""
    result = CliRunner().invoke(app, list(words), prog_name=PROGRAM, env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "qwen.toml"
    path.write_text(POLICY)
    return path


def test_start_up_imports_nothing_but_typer_and_the_standard_library() -> None:
    code = (
        "import sys, supervisord_vllm.cli.main as m\n"
        "heavy = {'pydantic', 'aiohttp', 'structlog', 'pynvml', 'prometheus_client', 'psutil', 'rich'}\n"
        "ours = {name for name in sys.modules if name.startswith('supervisord_vllm')}\n"
        "print(sorted(heavy & set(sys.modules)), sorted(ours))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True
    )
    assert done.stdout.strip() == "[] ['supervisord_vllm', 'supervisord_vllm.cli', 'supervisord_vllm.cli.main']"


def test_help_lists_every_verb_with_a_line_and_imports_none() -> None:
    code = (
        "import sys\nfrom supervisord_vllm.cli.main import app, VERBS\n"
        "app(['--help'], standalone_mode=False)\n"
        "assert not {verb.module for verb in VERBS.values()} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True
    )
    for name, verb in VERBS.items():
        assert any(line.split(maxsplit=1) == [name, verb.help] for line in done.stdout.splitlines()), name


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_its_function_with_help(name: str) -> None:
    function = getattr(import_module(VERBS[name].module), name)
    assert function.__doc__
    code, said = called(name, "--help")
    assert code == 0
    assert f"{PROGRAM} {name} [OPTIONS]" in said


def test_version_is_one_line() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"vllm-supervise {__version__}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Usage: vllm-supervise"),
        (("frobnicate",), "No such command 'frobnicate'"),
        (("chek",), "Did you mean"),
        (("check",), "Missing option"),
        (("check", "--config"), "requires an argument"),
        (("--bogus",), "No such option: --bogus"),
        (("run", "--config", "x", "extra"), "unexpected extra argument"),
        (("check", "--config", "x", "--set", "engine.port"), "'engine.port' is no KEY=VALUE"),
    ],
)
def test_wrong_usage_ends_with_2(words: tuple[str, ...], said: str) -> None:
    code, output = called(*words)
    assert code == ExitCode.USAGE
    assert said in output


@pytest.mark.parametrize("verb", [("check", "--config"), ("run", "--config"), ("--config",), ("-c",)])
def test_a_bad_policy_ends_with_78_and_one_line_on_stderr(tmp_path: Path, verb: tuple[str, ...]) -> None:
    path = tmp_path / "q.toml"
    path.write_text('schema = 1\n[engine]\nmodel = "m"\nprot = 1\n')
    done = run(*verb, str(path))
    assert (done.returncode, done.stdout) == (ExitCode.CONFIGURATION, "")
    assert done.stderr == f"{path}:4: engine.prot: unknown key; did you mean port?\n"


def test_check_shows_what_a_policy_means_without_its_secrets(policy: Path) -> None:
    done = run("check", "--config", str(policy))
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "vllm serve m --port 8000 --gpu-memory-utilization 0.9 --api-key '***'",
        f"0.900  [{policy}:6]",
        "rung 1: 0.700 to 0.900, blind steps of 0.050",
        "rung 2: may be turned on",
        "or small (awq)",
        "(max_num_seqs)",
        "burst     at most 32 requests at once, prompt tokens: as many as fill one step together, output tokens: 64",
        "soak      30 s, memory is judged",
        "an API key on the command line is seen by every user (ps); api-key-file keeps it off",
    ):
        assert line in done.stdout, line
    assert "supersecret" not in done.stdout


def test_check_as_json_has_levers_with_bounds_and_origins_and_remedies_per_kind(policy: Path) -> None:
    done = run("check", "--config", str(policy), "--json", "--set", "engine.port=81", SUPERVISE_ENGINE__MODEL="big")
    report = json.loads(done.stdout)
    assert (done.returncode, report["schema"], report["ok"], report["name"]) == (0, 1, True, "qwen")
    assert report["argv"][:5] == ["vllm", "serve", "big", "--port", "81"]
    assert report["levers"]["gpu_memory_utilization"] == {
        "declared": 0.9,
        "origin": f"{policy}:6",
        "movable": True,
        "rung": 1,
        "min": 0.7,
        "min_origin": f"{policy}:9",
        "max": 0.9,
        "max_origin": "default",
        "step": 0.05,
        "step_origin": "default",
    }
    assert report["proof"]["canary"] == "auto"
    assert report["proof"]["burst"] == {
        "requests": 32,
        "prompt_tokens": None,
        "output_tokens": 64,
        "at_most": True,
        "max_s": 300.0,
    }
    assert report["levers"]["weights"]["use"] == [{"model": "small", "quantization": "awq"}]
    assert report["levers"]["weights"]["origin"] == "environment SUPERVISE_ENGINE__MODEL"
    assert report["origins"]["engine.port"] == "flag --set engine.port"
    assert set(report["remedies"]) == {kind.value for kind in Kind} - {"none"}
    assert report["remedies"]["oom_weights"] == ["weights", "stop"]
    assert "supersecret" not in done.stdout


def test_check_as_json_says_the_problems_of_a_bad_policy(tmp_path: Path) -> None:
    done = run("check", "--config", str(tmp_path / "none.toml"), "--json")
    assert done.returncode == ExitCode.CONFIGURATION
    report = json.loads(done.stdout)
    assert (report["schema"], report["ok"], len(report["problems"])) == (1, False, 1)


def test_check_judges_this_machine_only_when_asked(policy: Path, tmp_path: Path) -> None:
    words = ("check", "--config", str(policy), "--set", 'engine.command=["/nowhere/vllm", "serve"]')
    folders = {"SUPERVISE_STATE_DIR": str(tmp_path / "state"), "SUPERVISE_RUNTIME_DIR": str(tmp_path / "run")}
    assert run(*words, **folders).returncode == 0
    done = run(*words, "--host", "--json", **folders)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (ExitCode.CONFIGURATION, False)
    assert any(found["severity"] == "error" and "/nowhere/vllm" in found["text"] for found in report["host"])


def test_output_into_a_closed_pipe_is_no_error(policy: Path) -> None:
    command = f"{sys.executable} -m supervisord_vllm.cli.main check --config {policy}; echo rc=$? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({command}) | true"], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr


def test_a_module_of_every_verb_exists() -> None:
    assert [verb.module for verb in VERBS.values() if find_spec(verb.module) is None] == []
