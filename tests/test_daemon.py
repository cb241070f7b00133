"""The whole daemon on the stand-in engine: real processes, signals, sockets and store."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from daemon_process import MODEL, PATIENCE_S, daemon, get, until
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.state import State
from supervisord_vllm.replay import replay
from supervisord_vllm.store import History


def replayed(folder: Path) -> None:
    """Replay of the recorded facts through the unchanged policy gives every recorded decision again."""
    history = History.open(folder / "state" / "history.sqlite3")
    assert history is not None
    recorded = [record.decision() for record in history.decisions()]
    again = [decision for run in history.runs() for decision in replay(history, run.run, None, decide, State.initial())]
    history.close()
    assert again == recorded
    assert recorded, "there must be something to replay"


def forget_the_state(folder: Path) -> None:
    """As after a reboot: what the daemon before kept of its state is of another boot."""
    with contextlib.closing(sqlite3.connect(folder / "state" / "history.sqlite3", isolation_level=None)) as store:
        changed = store.execute("UPDATE meta SET value = json_set(value, '$.boot_id', 'x') WHERE key = 'carried'")
        assert changed.rowcount == 1


def test_a_neighbour_a_runtime_oom_and_a_stop_are_survived_told_and_replayed() -> None:
    faults = "neighbour-takes launch=1 bytes=32GiB for=40s; oom at=running after-requests=3 launch=2"
    with daemon(faults=faults) as it:
        it.start()
        serving = it.reaches("serving", 2)
        assert serving["launch"]["levers"]["gpu_memory_utilization"] == 0.766
        assert serving["degraded"] is True
        assert serving["ready"] is True
        assert serving["declared"]["gpu_memory_utilization"] == 0.9
        assert it.http_get("/livez")[0] == 200
        assert it.http_get("/readyz")[0] == 200
        until(lambda: it.complete()[0] != 200, it.told)
        recovered = it.reaches("serving", 3)
        assert recovered["launch"]["levers"]["gpu_memory_utilization"] == 0.716
        assert it.complete()[0] == 200
        decision = recovered["decision"]
        assert decision["kind"] == "oom_runtime"
        assert decision["moves"] == [
            {
                "lever": "gpu_memory_utilization",
                "from": 0.766,
                "to": 0.716,
                "direction": "down",
                "how": "stepped",
            }
        ]
        metrics = it.http_get("/metrics")[1]
        assert 'vllm_supervise_state{state="serving"} 1.0' in metrics
        assert "vllm_supervise_launches_total 3.0" in metrics
        assert 'vllm_supervise_failures_total{kind="oom_runtime"} 1.0' in metrics
        assert 'vllm_supervise_lever{lever="gpu_memory_utilization"} 0.716' in metrics
        assert "vllm_supervise_recovery_seconds_count 2.0" in metrics
        assert it.term() == 0
        history = it.history()
        assert [launch["number"] for launch in history["launches"]] == [1, 2, 3]
        assert [launch["outcome"] for launch in history["launches"]] == ["gpu_busy_foreign", "oom_runtime", "stopped"]
        assert [decision["kind"] for decision in history["decisions"]] == [
            "gpu_busy_foreign",
            "gpu_busy_foreign",
            "oom_runtime",
        ]
        assert "0.766 → 0.716" in it.verb("explain")
        assert "no daemon" in it.verb("status")
        replayed(it.folder)


@pytest.mark.parametrize(
    ("stage", "kind", "launches", "status"),
    [
        ("loading", "oom_weights", 1, 69),
        ("profiling", "oom_profile", 2, None),
        ("kv-alloc", "oom_kv_alloc", 2, None),
        ("capture", "oom_cudagraph", 2, None),
    ],
)
def test_running_out_of_memory_in_each_stage_of_the_start_is_named_and_cured_or_stopped(
    stage: str, kind: str, launches: int, status: int | None
) -> None:
    with daemon(faults=f"oom at={stage} launch=1", levers="max-num-batched-tokens = 8192") as it:
        it.start()
        if status is None:
            it.reaches("serving", launches)
            assert it.term() == 0
        else:
            assert it.wait() == status
        history = it.history()
        assert len(history["launches"]) == launches
        assert history["decisions"][0]["kind"] == kind
        replayed(it.folder)


def test_the_sampler_warm_up_out_of_memory_lowers_the_sequences() -> None:
    with daemon(faults="oom at=warm-up launch=1") as it:
        it.start()
        it.reaches("serving", 2)
        (decision,) = it.history()["decisions"]
        assert decision["kind"] == "oom_sampler_warmup"
        assert [move["lever"] for move in decision["moves"]] == ["max_num_seqs"]


def test_a_length_above_the_pool_is_served_at_launch_two() -> None:
    ladder = '[[ladder]]\nlever = "max-model-len"\nmin = 1024\n'
    with daemon(ladder=ladder) as it:
        text = it.policy.read_text().replace("= 0.90", "= 0.135").replace("= 8192", "= 131072")
        it.policy.write_text(text)
        it.start()
        serving = it.reaches("serving", 2)
        length = serving["launch"]["levers"]["max_model_len"]
        assert 55_000 < length < 65_000
        assert length % 16 == 0
        assert serving["decision"]["kind"] == "kv_len_too_long"


def test_no_room_for_the_cache_raises_utilization_by_the_deficit() -> None:
    with daemon() as it:
        it.policy.write_text(it.policy.read_text().replace("= 0.90", "= 0.10").replace("min = 0.60", "min = 0.05"))
        it.start()
        serving = it.reaches("serving", 2)
        assert 0.112 <= serving["launch"]["levers"]["gpu_memory_utilization"] <= 0.2
        assert serving["decision"]["kind"] == "kv_no_blocks"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"args": '["--frobnicate"]'}, "unrecognized arguments: --frobnicate"),
        ({"model": "/nowhere/at/all"}, "Repo id must be in the form"),
    ],
)
def test_what_vllm_refuses_is_one_launch_with_its_own_sentence(values: dict[str, object], sentence: str) -> None:
    faults = "missing-model" if "model" in values else ""
    with daemon(faults=faults, **values) as it:
        it.start()
        assert it.wait() == 69
        (decision,) = it.history()["decisions"]
        assert decision["kind"] == "bad_config"
        assert sentence in decision["sentence"]
        assert len(it.history()["launches"]) == 1
        assert sentence in it.told()


def test_a_length_above_the_models_is_clamped_to_what_vllm_printed() -> None:
    with daemon() as it:
        it.policy.write_text(it.policy.read_text().replace("= 8192", "= 200000"))
        it.start()
        serving = it.reaches("serving", 2)
        assert serving["launch"]["levers"]["max_model_len"] == 131072
        assert serving["decision"]["kind"] == "bad_config"


def test_an_unknown_failure_is_tried_once_more_then_shown_and_stopped() -> None:
    with daemon(faults="unknown at=loading") as it:
        it.start()
        assert it.wait() == 69
        history = it.history()
        assert [launch["levers"] for launch in history["launches"]] == [history["launches"][0]["levers"]] * 2
        assert history["decisions"][-1]["kind"] == "unknown"
        assert history["decisions"][-1]["evidence"], "the first error lines are the evidence"


def test_an_engine_that_dies_silently_with_status_zero_comes_back_as_it_was() -> None:
    with daemon(faults="die at=running after-requests=2 launch=1") as it:
        it.start()
        it.reaches("serving", 1)
        until(lambda: it.complete()[0] != 200, it.told)
        again = it.reaches("serving", 2)
        assert again["degraded"] is False
        history = it.history()
        assert history["launches"][0]["outcome"] == "engine_dead"
        assert history["launches"][0]["exit_code"] == 0
        assert it.complete()[0] == 200


def test_act_false_supervises_and_only_says() -> None:
    with daemon(faults="oom at=running after-requests=1", top="act = false") as it:
        it.start()
        assert it.wait() == 69
        history = it.history()
        assert len(history["launches"]) == 1
        (decision,) = history["decisions"]
        assert decision["outcome"] == "only said: act = false"
        assert decision["moves"]


def test_hold_stop_and_start_by_the_operator() -> None:
    with daemon() as it:
        it.start()
        it.reaches("serving", 1)
        assert "held" in it.verb("hold", "--reason", "measuring")
        assert it.status()["held"] is True
        it.verb("stop", "--reason", "maintenance")
        it.reaches("stopped")
        assert it.marked() == []
        assert it.http_get("/readyz")[0] == 503
        it.verb("stop")
        it.verb("start")
        it.reaches("serving", 2)
        it.verb("start", status=3)
        it.verb("resume")
        assert it.status()["held"] is False
        assert it.history()["decisions"] == []


def test_term_while_starting_and_while_streaming_ends_everything_with_status_zero() -> None:
    with daemon(faults="slow-start factor=50") as it:
        it.start()
        until(it.marked, it.told)
        assert it.term() == 0
        assert it.marked() == []
    with daemon(faults="term-hang") as it:
        it.policy.write_text(it.policy.read_text() + '[stop]\ngrace = "1s"\n')
        it.start()
        it.reaches("serving", 1)
        stream = threading.Thread(target=it.complete, kwargs={"stream": True, "max_tokens": 5000})
        stream.start()
        until(lambda: ((it.status().get("load") or {}).get("running") or 0) >= 1, it.status)
        assert it.term() == 0
        assert it.marked() == []
        stream.join(PATIENCE_S)
        assert not stream.is_alive()


def test_what_cannot_be_adopted_is_ended_and_the_next_daemon_starts_at_last_known_good() -> None:
    with daemon(faults="oom at=running after-requests=1 launch=1") as it:
        it.start()
        it.reaches("serving", 2)
        until(lambda: it.history()["launches"][1]["proven_at"], it.told)
        assert it.process is not None
        it.process.kill()
        it.process.wait()
        assert it.marked(), "the orphans are the point of this test"
        forget_the_state(it.folder)
        it.start()
        serving = it.reaches("serving", 3)
        assert serving["launch"]["levers"]["gpu_memory_utilization"] == 0.85
        assert serving["decision"]["moves"][0]["how"] == "restored"
        assert len({*it.marked()} - {serving["launch"]["pid"]}) >= 1
        assert it.term() == 0
        replayed(it.folder)


def test_an_exhausted_budget_gives_up_again_at_once_within_this_boot_unless_reset() -> None:
    with daemon(faults="die at=running after=700ms") as it:
        it.policy.write_text(it.policy.read_text().replace("[restart]\n", "[restart]\nbudget = 1\n"))
        it.start()
        assert it.wait() == 69
        launches = len(it.history()["launches"])
        it.start()
        assert it.wait() == 69
        assert len(it.history()["launches"]) == launches
        it.start("--reset")
        assert it.wait() == 69
        again = len(it.history()["launches"])
        assert again > launches
        assert "afresh" in it.verb("reset")
        it.start()
        assert it.wait() == 69
        assert len(it.history()["launches"]) > again


def test_a_reset_without_a_daemon_and_a_history_is_refused() -> None:
    with daemon() as it:
        assert "no history" in it.verb("reset", status=3)


def test_a_taken_engine_port_is_waited_for_and_its_owner_named() -> None:
    with daemon(deadline="10s") as it, socket.socket() as squatter:
        squatter.bind(("127.0.0.1", it.port))
        squatter.listen()
        it.start()
        assert it.wait() == 69
        (decision,) = it.history()["decisions"]
        assert decision["kind"] == "port_in_use"
        assert f"pid {os.getpid()}" in decision["sentence"]
        assert it.history()["launches"] == []


def test_our_own_http_port_taken_is_no_reason_not_to_supervise() -> None:
    with daemon() as it, socket.socket() as squatter:
        squatter.bind(("127.0.0.1", it.http))
        squatter.listen()
        it.start()
        until(lambda: '"state": "serving"' in it.verb("status", "--json", status=None), it.told)
        assert "going on without HTTP" in it.told()
        assert it.term() == 0


def test_a_second_daemon_on_the_same_state_directory_is_refused_and_the_first_is_untouched() -> None:
    with daemon() as it:
        it.start()
        first = it.reaches("serving", 1)
        ran = subprocess.run(
            [sys.executable, "-m", "supervisord_vllm.cli.main", "--config", str(it.policy)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 78
        assert str(it.folder / "state") in ran.stderr
        assert it.process is not None
        assert f"pid {it.process.pid}" in ran.stderr
        assert len(ran.stderr.strip().splitlines()) == 1
        assert it.status()["launch"]["pid"] == first["launch"]["pid"]
        assert it.complete()[0] == 200


@pytest.mark.parametrize(
    ("change", "place", "fix"),
    [
        (("command = [", 'command = ["/no/such/program", '), "/no/such/program", "engine.command"),
        (('state-dir = "', 'state-dir = "/proc/nothing'), "/proc/nothing", "state-dir"),
    ],
)
def test_what_cannot_work_on_this_machine_is_one_line_and_status_78(
    change: tuple[str, str], place: str, fix: str
) -> None:
    with daemon() as it:
        it.policy.write_text(it.policy.read_text().replace(*change))
        it.start()
        assert it.wait() == 78
        (line,) = it.errors.read_text().strip().splitlines()
        assert place in line
        assert fix in line


def test_secrets_are_in_nothing_that_is_printed_stored_or_served() -> None:
    secret = "tok-4711-very-secret"
    with daemon(args=f'["--api-key", "{secret}"]') as it:
        text = it.policy.read_text()
        it.policy.write_text(text.replace("[engine.env]", f'[engine.env]\nHF_TOKEN = "{secret}-hf"'))
        it.start()
        until(lambda: it.status().get("state") in ("serving", "given-up"), it.told)
        page = it.http_get("/api/v1/status")[1] + it.http_get("/metrics")[1] + it.verb("history", "--json")
        assert it.term() == 0
        stored = b"".join(path.read_bytes() for path in (it.folder / "state").glob("history.sqlite3*"))
        for where, content in {
            "served": page,
            "stderr": it.errors.read_text(),
            "stdout": it.output.read_text(),
            "store": stored.decode("utf-8", "replace"),
        }.items():
            assert secret not in content, where


def test_the_api_key_of_the_engine_is_used_for_probes() -> None:
    with daemon() as it:
        key = it.folder / "key"
        key.write_text("k-123456\n")
        key.chmod(0o600)
        it.policy.write_text(it.policy.read_text().replace("[engine.env]", f'api-key-file = "{key}"\n[engine.env]'))
        it.start()
        it.reaches("serving", 1)
        assert it.complete()[0] == 401
        assert get(f"http://127.0.0.1:{it.port}/v1/models")[0] == 401
        assert MODEL in it.policy.read_text()


def test_the_second_signal_of_a_terminal_does_not_hurt() -> None:
    with daemon() as it:
        it.start()
        it.reaches("serving", 1)
        assert it.process is not None
        it.process.send_signal(signal.SIGINT)
        it.process.send_signal(signal.SIGTERM)
        assert it.wait() == 0
