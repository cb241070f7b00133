"""Pressure in the living daemon on the stand-in engine: drain, change, proof, verdict, and roll-back, under real load.

The load is open: requests come at a rate that the engine as declared cannot serve, so that a queue grows.
"""

from __future__ import annotations

import time
from typing import Any

from daemon_process import DaemonProcess, daemon, until
from load import Load
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.state import State
from supervisord_vllm.replay import replay
from supervisord_vllm.store import History

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


def kept_or_not(it: DaemonProcess, launch: int) -> dict[str, Any]:
    """Wait until the change of a launch was judged: the status from then on."""

    def judged() -> dict[str, Any] | None:
        found = it.status()
        pressure = found.get("pressure") or {}
        number = (found.get("launch") or {}).get("number")
        serves = found.get("state") == "serving" and number == launch
        return found if serves and pressure.get("judging") is False and it.http_get("/readyz")[0] == 200 else None

    return until(judged, lambda: f"{it.status()} {it.told()}")


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
        with Load(it.port, it.http, rate=30, prompt=16, output=20) as load:
            began = time.monotonic()
            it.reaches("serving", 2)
            changed = time.monotonic()
            found = kept_or_not(it, 2)
            ended = time.monotonic()
        assert found["launch"]["levers"]["max_num_seqs"] == 16
        decision = found["decision"]
        assert decision["kind"] == "overload"
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
