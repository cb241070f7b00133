"""`vllm-supervise diagnose`: a log in, a verdict out, and nothing heavy imported on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from labelled import CAPTURES, DATA
from supervisord_vllm.cli.diagnose import bounded_lines, diagnose
from supervisord_vllm.engine.lines import LIMIT
from supervisord_vllm.engine.logfile import followed
from supervisord_vllm.holes import punch

H200 = CAPTURES / "h200-vllm-0.26.0"
ROOT = DATA.parent.parent

app = typer.Typer()
app.command()(diagnose)


def run(*arguments: str, stdin: bytes | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    return result.exit_code, result.stdout, result.stderr


def test_the_json_is_the_public_contract() -> None:
    code, out, _ = run("--json", str(H200 / "06-len-over-kv.log"))
    data = json.loads(out)
    evidence = data.pop("evidence")
    assert code == 0
    assert data == {
        "schema": 1,
        "kind": "kv_len_too_long",
        "phase": "startup",
        "action": "next_config",
        "change": [
            {"lever": "max_model_len", "direction": "down", "to": 60000},
            {"lever": "gpu_memory_utilization", "direction": "up", "to": None},
            {"lever": "kv_cache_dtype", "direction": "switch", "to": None},
        ],
        "target": None,
        "numbers": {
            "util": 0.135,
            "max_model_len": 131072,
            "needed_kv_gib": 7.0,
            "available_kv_gib": 3.2,
            "estimated_max_len": 60000,
        },
        "confidence": 0.98,
        "summary": "One request of 131,072 tokens needs 7.0 GiB of KV cache; 3.2 GiB are left after weights and "
        "activations.",
        "advice": "Set --max-model-len 60000, or raise --gpu-memory-utilization by 3.80 GiB / (the card's total) if "
        "the card has the room.",
    }
    assert evidence[0]["line"] == 42
    assert evidence[0]["role"] == "EngineCore"
    assert evidence[0]["text"].startswith("ValueError: To serve at least one request")


@pytest.mark.parametrize("path", sorted(H200.glob("*.log")), ids=lambda path: path.stem)
def test_the_human_answer_has_two_to_six_lines(path: Path) -> None:
    code, out, _ = run(str(path))
    assert code == 0
    lines = out.splitlines()
    assert 2 <= len(lines) <= 6
    assert lines[-1].startswith("  action: ")


def test_the_human_answer_names_cause_evidence_and_flag() -> None:
    _, out, _ = run(str(H200 / "04-cotenant-free-below-util.log"))
    assert out.startswith("gpu_busy_foreign (startup): 98.77 GiB of the card's 139.8 GiB were free at start")
    assert "line 32, EngineCore: ValueError: Free memory on device cuda:0" in out
    assert "set: --gpu-memory-utilization 0.705" in out


def test_standard_input_is_read_for_a_dash() -> None:
    code, out, _ = run("--json", "-", stdin=(H200 / "05-no-cache-blocks.log").read_bytes())
    assert (code, json.loads(out)["kind"]) == (0, "kv_no_blocks")


def test_a_log_of_which_the_middle_was_given_up_is_judged_by_the_rest(tmp_path: Path) -> None:
    up = b"Application startup complete.\n"
    head, up, end = (H200 / "08-runtime-oom.log").read_bytes().partition(up)
    head += up
    path = tmp_path / "000001.log"
    filler = b'(APIServer pid=1) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    path.write_bytes(head + filler * 20_000 + end)
    whole = json.loads(run("--json", str(path))[1])
    file = os.open(path, os.O_RDWR)
    first, last = punch(file, len(head), path.stat().st_size - len(end) - len(filler))
    os.close(file)
    assert last - first > 1 << 20
    punched = json.loads(run("--json", str(path))[1])
    for verdict in (whole, punched):
        for evidence in verdict["evidence"]:
            del evidence["line"]
    assert punched == whole
    file = os.open(path, os.O_RDWR)
    punch(file, 0, first)
    os.close(file)
    assert json.loads(run("--json", str(path))[1])["kind"] == whole["kind"], "a hole at the beginning is no binary file"


def test_exit_code_is_asked_for() -> None:
    bad, good = str(H200 / "05-no-cache-blocks.log"), str(H200 / "01-seed-cold.log")
    assert run(bad)[0] == 0
    assert run("--exit-code", bad)[0] == 10
    assert run("--exit-code", good)[0] == 0
    assert run("--exit-code", good, bad)[0] == 10


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        (b"", "is empty; capture both outputs"),
        (b"\n \n", "is empty"),
        (b"\x1f\x8b\0\0gzip", "is a binary file; give the text"),
    ],
)
def test_an_input_that_cannot_be_judged_is_named_with_the_fix(tmp_path: Path, content: bytes, fix: str) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(content)
    code, out, err = run(str(path))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert str(path) in err
    assert fix in err


@pytest.mark.parametrize(("name", "fix"), [("missing.log", "there is no such file"), (".", "is a directory")])
def test_a_path_that_is_no_log_is_named_with_the_fix(tmp_path: Path, name: str, fix: str) -> None:
    code, _, err = run(str(tmp_path / name))
    assert code == 2
    assert len(err.splitlines()) == 1
    assert fix in err


def test_one_bad_file_does_not_hide_the_others(tmp_path: Path) -> None:
    code, out, err = run(str(tmp_path / "missing.log"), str(H200 / "18-bad-flag.log"))
    assert code == 2
    assert "bad_config" in out
    assert "missing.log" in err


def test_lines_are_bounded_however_they_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_bytes(b"a\n" + b"x" * (3 * LIMIT) + b"\nb\n\nend")
    with path.open("rb") as stream:
        lines = list(bounded_lines(stream))
    assert [len(line) for line in lines] == [1, LIMIT, 1, 0, 3]


def test_diagnose_imports_nothing_heavy() -> None:
    script = (
        "import sys, typer; from supervisord_vllm.cli.diagnose import diagnose; "
        f"diagnose([{str(H200 / '08-runtime-oom.log')!r}]); "
        "heavy = {'aiohttp', 'pydantic', 'structlog', 'pynvml', 'psutil', 'prometheus_client'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("oom_runtime (runtime): ")


# ---- several launches, a policy's view, a growing file

POLICY = """
schema = 1
[engine]
command = ["vllm", "serve"]
model = "m"
[levers]
gpu-memory-utilization = 0.90
max-model-len = 131072
[[ladder]]
lever = "gpu-memory-utilization"
step = 0.05
min = 0.50
max = 0.95
[[ladder]]
lever = "max-model-len"
min = 4096
"""


def test_earlier_launches_are_listed_in_both_forms(tmp_path: Path) -> None:
    log = tmp_path / "all.log"
    log.write_bytes(b"".join((H200 / f"{n}.log").read_bytes() for n in ("05-no-cache-blocks", "06-len-over-kv")))
    data = json.loads(run("--json", str(log))[1])
    assert data["kind"] == "kv_len_too_long"
    assert [(e["kind"], e["action"], e["reached"]) for e in data["earlier"]] == [
        ("kv_no_blocks", "next_config", "profiling")
    ]
    assert data["earlier"][0]["lines"][0] == 1
    assert "  earlier, lines 1-" in run(str(log))[1]


def test_several_files_are_told_apart() -> None:
    names = [str(H200 / f"{n}.log") for n in ("05-no-cache-blocks", "01-seed-cold")]
    objects = [json.loads(line) for line in run("--json", *names)[1].splitlines()]
    assert [(o["file"], o["kind"]) for o in objects] == [(names[0], "kv_no_blocks"), (names[1], "none")]
    assert run(*names)[1].startswith(f"{names[0]}:\nkv_no_blocks ")


def test_a_policy_says_what_it_would_do(tmp_path: Path) -> None:
    policy = tmp_path / "qwen.toml"
    policy.write_text(POLICY)
    data = json.loads(run("--json", "--config", str(policy), str(H200 / "06-len-over-kv.log"))[1])
    assert data["action"] == "next_config"
    assert data["policy"]["name"] == "qwen"
    assert data["change"] == [{"lever": "max_model_len", "direction": "down", "to": 60000}]
    move = data["policy"]["moves"][0]
    assert (move["lever"], move["from"], move["to"]) == ("max_model_len", 131072, 60000)
    assert any(reason.startswith("gpu_memory_utilization: ") for reason in data["policy"]["skipped"])
    _, out, _ = run("--config", str(policy), str(H200 / "06-len-over-kv.log"))
    assert "  this policy: next_config: max_model_len 131072 → 60000" in out


def test_a_policy_that_may_move_nothing_stops(tmp_path: Path) -> None:
    policy = tmp_path / "fixed.toml"
    policy.write_text(POLICY.partition("[[ladder]]")[0])
    data = json.loads(run("--json", "--config", str(policy), str(H200 / "06-len-over-kv.log"))[1])
    assert data["action"] == "stop_explain"
    assert data["policy"]["moves"] == []


def test_a_policy_does_nothing_about_what_is_no_failure(tmp_path: Path) -> None:
    policy = tmp_path / "qwen.toml"
    policy.write_text(POLICY)
    data = json.loads(run("--json", "--config", str(policy), str(H200 / "01-seed-cold.log"))[1])
    assert (data["action"], data.get("policy")) == ("no_action", None)


def test_a_wrong_policy_ends_with_78(tmp_path: Path) -> None:
    policy = tmp_path / "bad.toml"
    policy.write_text("schema = 1\n[engin]\n")
    code, _, err = run("--config", str(policy), str(H200 / "01-seed-cold.log"))
    assert code == 78
    assert "engin" in err


def test_following_wants_one_file_that_grows() -> None:
    assert run("--follow", "-")[0] == 2
    assert run("--follow", "a", "b")[0] == 2


def test_a_growing_file_is_followed_verdict_by_verdict_and_through_rotation(tmp_path: Path) -> None:
    """Fed in pieces; each verdict comes once the file is quiet."""
    log = tmp_path / "vllm.log"
    first = (H200 / "05-no-cache-blocks.log").read_bytes()
    second = (H200 / "04-cotenant-free-below-util.log").read_bytes()
    log.write_bytes(first[:2000])
    seen: list[tuple[str, int]] = []
    pieces = [first[2000:], second, None]
    for launches in followed(str(log), poll_s=0.01, quiet_s=0.05):
        seen.append((launches.verdict().kind.value, len(launches.earlier)))
        if not pieces:
            break
        piece = pieces.pop(0)
        if piece is None:  # rotated: the new file begins anew
            log.rename(tmp_path / "vllm.log.1")
            log.write_bytes((H200 / "06-len-over-kv.log").read_bytes())
        else:
            with log.open("ab") as stream:
                stream.write(piece)
    assert seen == [("none", 0), ("kv_no_blocks", 0), ("gpu_busy_foreign", 1), ("kv_len_too_long", 0)]


def test_the_policys_view_alone_imports_pydantic(tmp_path: Path) -> None:
    policy = tmp_path / "qwen.toml"
    policy.write_text(POLICY)
    script = (
        "import sys; from supervisord_vllm.cli.diagnose import diagnose; from pathlib import Path; "
        f"diagnose([{str(H200 / '06-len-over-kv.log')!r}]); before = 'pydantic' in sys.modules; "
        f"diagnose([{str(H200 / '06-len-over-kv.log')!r}], config=Path({str(policy)!r})); "
        "sys.exit(before or 'pydantic' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
