"""The way back up with the real daemon on the stand-in engine: over a power failure, with a hold, and without one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import threading
from typing import Any

import pytest

from daemon_process import PATIENCE_S, DaemonProcess, daemon, until
from supervisord_vllm.cli.daemon import ask
from supervisord_vllm.clock import parse_rfc3339

pytestmark = pytest.mark.slow

ONLY_EAGER = '[[ladder]]\nlever = "enforce-eager"\n[step-up]\nafter = "1s"\n'
WEEK_S = 8 * 24 * 3600
QUICKLY = ("--set", "poll.metrics=200ms")


def power_fails(it: DaemonProcess) -> None:
    """Daemon and engine are gone at once, and what the store keeps is of another boot, a week ago."""
    assert it.process is not None
    it.process.kill()
    it.process.wait()
    for pid in it.marked():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not it.marked(), it.marked)
    with contextlib.closing(sqlite3.connect(it.folder / "state" / "history.sqlite3")) as store, store:
        for key, text in store.execute("SELECT key, value FROM meta").fetchall():
            store.execute("UPDATE meta SET value = ? WHERE key = ?", (json.dumps(_aged(key, json.loads(text))), key))


def _aged(key: str, value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict) and "boot" in value:
        return {**value, "boot": "another", "since_ns": 7, "until_ns": 8}
    if isinstance(value, dict) and "boot_id" in value:
        return {**value, "boot_id": "another"}
    if key.startswith("observations:"):
        return [{**seen, "wall_s": seen["wall_s"] - WEEK_S} for seen in value]
    return value


def test_after_a_power_failure_it_is_still_held_and_climbs_in_its_window_once_that_ends() -> None:
    with daemon(faults="oom at=capture launch=1", ladder=ONLY_EAGER) as it:
        it.start(*QUICKLY)
        it.reaches("serving", 2)
        said = it.verb("hold", "--for", "2h", "--reason", "benchmark")
        assert "held for 2 h" in said
        hold = it.status()["hold"]
        assert hold["reason"] == "benchmark"
        until(lambda: it.history()["launches"][1]["proven_at"], it.told)
        power_fails(it)
        assert "held by" in " ".join(it.verb("status").split()), "the store says it where no daemon runs"
        it.start(*QUICKLY, "--set", "step-up.window=00:00-24:00")
        serving = it.reaches("serving", 3)
        assert serving["launch"]["levers"]["enforce_eager"] is True
        assert serving["decision"]["moves"][0]["how"] == "restored"
        assert {**serving["hold"], "since": None, "until": None} == {**hold, "since": None, "until": None}
        assert abs(parse_rfc3339(serving["hold"]["until"]) - parse_rfc3339(hold["until"])) < 5
        explained = it.verb("explain")
        assert "enforce_eager on, declared off: a failure lowered it" in " ".join(explained.split())
        assert "once the hold is over" in " ".join(explained.split())
        answers: list[tuple[int, str]] = []
        client = threading.Thread(target=lambda: answers.append(it.complete(max_tokens=1000)))
        client.start()
        until(lambda: ((it.status().get("load") or {}).get("running") or 0) >= 1, it.status)
        ask(it.folder / "run" / "control.sock", "/command", {"verb": "hold", "for": "200ms"})
        it.reaches("draining")  # its window is open: requests are waited for, not a moment without any
        climbed = it.reaches("serving", 4)
        client.join(PATIENCE_S)
        ((code, body),) = answers
        assert code == 200, body
        assert json.loads(body)["usage"]["completion_tokens"] == 1000
        assert climbed["launch"]["levers"].get("enforce_eager") in (None, False)
        assert climbed["held"] is False
        assert climbed["way_back"] is None
        assert climbed["decision"]["sentence"].startswith("Launch 3 has served for")
        assert "vllm_supervise_held 0.0" in it.http_get("/metrics")[1]
        assert it.term() == 0
        assert "held" not in it.verb("status")


def test_a_hold_for_no_duration_is_refused_before_it_reaches_the_daemon() -> None:
    with daemon() as it:
        assert 'write a duration like "90s"' in it.verb("hold", "--for", "2hours", status=2)
