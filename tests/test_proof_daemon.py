"""The proof of a launch by the real daemon on the stand-in engine: what is sent, told, measured, and what fails."""

from __future__ import annotations

import json
from typing import Any

from daemon_process import DaemonProcess, daemon, until


def events(it: DaemonProcess, begins: str) -> list[dict[str, object]]:
    """The daemon's own log lines that begin like this."""
    lines = (json.loads(line) for line in it.errors.read_text().splitlines() if line.startswith("{"))
    return [line for line in lines if str(line.get("event")).startswith(begins)]


def test_a_launch_is_proven_by_canary_burst_and_soak_and_all_three_are_told() -> None:
    with daemon(burst=8) as it:
        it.policy.write_text(it.policy.read_text().replace('soak = "300ms"', 'soak = "2500ms"'))
        it.start()
        soaking = until(lambda: _soaking(it), lambda: f"{it.status().get('proof')} {it.told()}")
        assert soaking["ready"] is True
        assert soaking["proven"] is False
        assert soaking["next"]["what"] == "proven when the soak is over"
        shown = it.verb("status")
        assert "proof" in shown
        assert "burst ██████████" in shown or "burst ##########" in shown
        serving = it.reaches("serving", 1)
        proof = serving["proof"]
        assert proof["part"] is None
        assert {name: proof[name]["percent"] for name in ("canary", "burst", "soak")} == {
            "canary": 100,
            "burst": 100,
            "soak": 100,
        }
        burst = proof["burst"]
        assert (burst["ok"], burst["requests"], burst["answered"], burst["failed"]) == (True, 8, 8, 0)
        assert burst["first_token_s"] > 0
        assert proof["canary"]["first_token_s"] > 0
        (memory,) = proof["soak"]["memory"]
        assert memory["own_bytes"] > 0
        assert memory["free_bytes"] > 0
        assert proof["soak"]["finding"] is None
        assert serving["decision"] is None
        (told,) = events(it, "burst: 8 of 8 requests at once were answered")
        assert told["level"] == "info"
        metrics = it.http_get("/metrics")[1]
        assert 'vllm_supervise_proof_progress_ratio{part="soak"} 1.0' in metrics
        assert 'vllm_supervise_proof_first_token_seconds{part="burst"}' in metrics
        assert "8 of 8 at once answered" in it.verb("status")


def _soaking(it: DaemonProcess) -> dict[str, Any] | None:
    found = it.status()
    part = (found.get("proof") or {}).get("part")
    return found if found.get("state") == "proving" and part == "soak" else None


def test_memory_that_runs_out_in_the_burst_is_judged_by_its_cause_and_the_burst_is_named() -> None:
    with daemon(burst=8, faults="oom at=running at-once=6 launch=1") as it:
        it.start()
        serving = it.reaches("serving", 2)
        decision = serving["decision"]
        assert (decision["kind"], decision["launch"]) == ("oom_runtime", 1)
        assert "Its proof failed in the burst" in decision["sentence"]
        assert "of 8 requests" in decision["sentence"]
        assert serving["launch"]["levers"]["gpu_memory_utilization"] == 0.85
        first, second = it.history()["launches"]
        assert first["ready_at"] is not None
        assert first["proven_at"] is None
        assert second["proven_at"] is not None
        assert serving["proof"]["burst"]["answered"] == 8
        assert 'vllm_supervise_proof_failures_total{part="burst"} 1.0' in it.http_get("/metrics")[1]


def test_a_stop_in_the_middle_of_the_burst_waits_for_none_of_its_requests() -> None:
    with daemon(burst=8, faults="hang at=running after-requests=4 launch=1") as it:
        it.start()
        until(lambda: (it.status().get("proof") or {}).get("part") == "burst", it.told)  # and for ever
        it.verb("stop")
        it.reaches("stopped")
        assert it.marked() == []
        assert it.history()["decisions"] == []
