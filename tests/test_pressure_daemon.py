"""Pressure in the living daemon on the stand-in engine: drain, change, proof, verdict, and roll-back, under real load.

The load is open: requests come at a rate that the engine as declared cannot serve, so that a queue grows.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from daemon_process import DaemonProcess, daemon, until
from load import loaded
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.state import State
from supervisord_vllm.replay import replay
from supervisord_vllm.store import History

pytestmark = pytest.mark.slow

SLOTS = """\
[[ladder]]
lever = "max-num-seqs"
factor = 0.5
min = 1
max = 16
"""


def pressed(it: DaemonProcess, timing: str = "", **replaced: str) -> None:
    """A policy with a target of 250 ms and a card with a timing of its own."""
    text = it.policy.read_text()
    for old, new in {"max-num-seqs = 16": "max-num-seqs = 2", **replaced}.items():
        assert old in text
        text = text.replace(old, new, 1)
    it.policy.write_text(text + '[pressure]\nttft-p95 = "250ms"\nfirst-restart-cost = "2s"\n')
    card = it.folder / "card.toml"
    card.write_text(card.read_text() + timing)


def judged(it: DaemonProcess, launch: int) -> dict[str, Any]:
    """Wait until a launch on trial was judged and kept: the status from then on."""

    def trial(on: bool) -> dict[str, Any] | None:
        found = it.status()
        number = (found.get("launch") or {}).get("number")
        serves = found.get("state") == "serving" and number == launch
        return found if serves and found["pressure"]["judging"] is on else None

    until(lambda: trial(on=True), lambda: f"{it.status()} {it.told()}")
    return until(lambda: trial(on=False), lambda: f"{it.status()} {it.told()}")


def changes(it: DaemonProcess) -> list[dict[str, Any]]:
    """The decisions that changed something: on a busy machine the first pages may look as if the card were the limit,
    and that is said as well."""
    return [decision for decision in it.history()["decisions"] if decision["moves"]]


def replayed(it: DaemonProcess) -> None:
    """Replay of the record gives the same decisions."""
    history = History.open(it.folder / "state" / "history.sqlite3")
    assert history is not None
    recorded = [record.decision() for record in history.decisions()]
    again = [decision for run in history.runs() for decision in replay(history, run.run, None, decide, State.initial())]
    history.close()
    assert again == recorded
    assert recorded


def test_too_few_slots_are_raised_after_a_drain_and_serve_more_afterwards() -> None:
    with daemon(ladder=SLOTS) as it:
        pressed(it)
        it.start()
        it.reaches("serving", 1)
        with loaded(it.port, it.http, rate=50, prompt=16, output=16) as load:
            began = time.monotonic()
            it.reaches("serving", 2)
            changed = time.monotonic()
            found = judged(it, 2)
            ended = time.monotonic()
        assert found["launch"]["levers"]["max_num_seqs"] == 16
        decision = until(lambda: next((d for d in changes(it) if "kept" in (d["outcome"] or "")), None), it.told)
        assert decision["kind"] == "overload"
        assert decision["outcome"].startswith("kept: ")
        assert decision["moves"] == [
            {"lever": "max_num_seqs", "from": 2, "to": 16, "direction": "up", "how": "computed"}
        ]
        assert "bound by its number of sequences" in decision["sentence"]
        assert load.failed == [], "the drain lost no request"
        before, after = load.rate_between(began, began + 3), load.rate_between(changed + 1, ended)
        assert after > before, (before, after)
        assert found["pressure"]["origin"] == "declared"
        metrics = it.http_get("/metrics")[1]
        assert 'vllm_supervise_pressure_target_seconds{what="ttft"} 0.25' in metrics
        assert it.term() == 0
        assert [launch["outcome"] for launch in it.history()["launches"]] == ["stopped", "stopped"]
        replayed(it)


def test_a_change_that_does_not_help_is_taken_back_and_costs_twice_the_next_time() -> None:
    """Each sequence adds as much to a step as the first: more of them serve no more."""
    with daemon(ladder=SLOTS) as it:
        pressed(it, 'token = "1ms"\nsequence = "2ms"\n')
        it.start()
        it.reaches("serving", 1)
        with loaded(it.port, it.http, rate=50, prompt=16, output=16) as load:
            it.reaches("serving", 3)
            assert load.failed == []
        first, second = changes(it)[:2]
        assert [move["to"] for move in first["moves"]] == [16]
        assert second["kind"] == "perf_regression"
        assert [(move["from"], move["to"], move["how"]) for move in second["moves"]] == [(16, 2, "restored")]
        assert "is no faster than the one before it" in second["sentence"]
        assert it.status()["launch"]["levers"]["max_num_seqs"] == 2
        assert it.term() == 0
        replayed(it)


def test_a_small_kv_cache_is_enlarged() -> None:
    ladder = '[[ladder]]\nlever = "gpu-memory-utilization"\nstep = 0.05\nmin = 0.11\nmax = 0.30\n'
    with daemon(ladder=ladder) as it:
        levers = {"max-num-seqs = 16": "max-num-seqs = 64", "= 0.90": "= 0.118", "= 8192": "= 4096"}
        pressed(it, 'token = "10ms"\nprefill = "1ms"\n', **levers)
        it.start()
        it.reaches("serving", 1)
        small = until(lambda: (it.status()["load"] or {}).get("kv_cache_tokens"), it.status)
        with loaded(it.port, it.http, rate=14, prompt=800, output=200) as load:
            it.reaches("serving", 2)
            assert load.failed == []
        large = until(lambda: (it.status()["load"] or {}).get("kv_cache_tokens"), it.status)
        decision = changes(it)[0]
        assert "bound by its KV cache" in decision["sentence"]
        assert [(move["lever"], move["direction"]) for move in decision["moves"]] == [("gpu_memory_utilization", "up")]
        assert large > 2 * small
        assert it.term() == 0
        replayed(it)


def test_where_the_card_itself_is_the_limit_nothing_is_restarted_and_the_lack_is_said() -> None:
    """Long prompts fill every step: requests wait beside free slots and a roomy cache."""
    with daemon(ladder=SLOTS.replace("max = 16", "max = 64")) as it:
        pressed(it, **{"max-num-seqs = 16": "max-num-seqs = 64"})
        it.start()
        it.reaches("serving", 1)
        with loaded(it.port, it.http, rate=25, prompt=4000, output=2):
            said = until(lambda: it.history()["decisions"], lambda: f"{it.status()} {it.told()}")
            pressure = it.status()["pressure"]
        assert said[0]["action"] == "observe"
        assert said[0]["moves"] == []
        assert "No restart: the card computes as fast as it can. The load needs about " in said[0]["sentence"]
        assert (pressure["verdict"], pressure["curable"]) == ("compute", False)
        assert pressure["engines_needed"] > 1
        assert it.status()["launch"]["number"] == 1
        metrics = it.http_get("/metrics")[1]
        assert 'vllm_supervise_pressure_verdict{verdict="compute"} 1.0' in metrics
        assert "vllm_supervise_pressure_engines_needed" in metrics
