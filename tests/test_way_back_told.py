"""Holds, windows, creep and the way back as an operator reads them: status, explain, check, metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from supervisord_vllm.api import Exporter
from supervisord_vllm.cli.history import render_explanation
from supervisord_vllm.cli.main import app
from supervisord_vllm.cli.status import render
from supervisord_vllm.clock import Now
from supervisord_vllm.core.creep import HOUR_NS, Growth
from supervisord_vllm.core.facts import DeviceMemory, Hold
from supervisord_vllm.core.ledger import GIB, MIB
from supervisord_vllm.core.levers import Levers, Rung
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import Launch, State, StateName
from supervisord_vllm.core.windows import Window
from supervisord_vllm.status import Document, Snapshot, snapshot_of, status_document

DECLARED = Levers({"gpu_memory_utilization": 900, "max_model_len": 65536})
POLICY = Policy("qwen", DECLARED, (Rung("max_model_len", min=4096),), windows=(Window(120, 300),))
WALL = 1_796_119_200  # 2026-12-01 10:00 UTC
NOW = Now(5 * 3600 * SECOND, float(WALL))
SHORTER = DECLARED.with_(max_model_len=30000)
LAUNCH = Launch(
    2, SHORTER, SHORTER, 0, pid=9, ready=True, ready_ns=1, proven=True, log="l", serving_ns=HOUR_NS, load="busy"
)
STATE = State(
    StateName.SERVING,
    since_ns=HOUR_NS,
    launch=LAUNCH,
    hold=Hold("ada", "benchmark", 4 * HOUR_NS, 20 * HOUR_NS),
    wall_offset_s=WALL - 5 * 3600,
    utc_offset_s=3600,
)
GROWTH = Growth("GPU-1", 5 * HOUR_NS, 210 * MIB, 180 * MIB, 240 * MIB, 4 * HOUR_NS, 60 * GIB, 10 * GIB)


class Daemon:
    """What an exporter asks."""

    def snapshot(self) -> Snapshot:
        return snapshot(STATE)


def snapshot(state: State) -> Snapshot:
    memory = (DeviceMemory("GPU-1", 80 * GIB, 10 * GIB, GIB, 60 * GIB),)
    return replace(snapshot_of(POLICY, state, NOW), memory=memory, growth={"GPU-1": GROWTH})


def document(state: State = STATE) -> Document:
    told: Document = json.loads(json.dumps(status_document(snapshot(state)), allow_nan=False))
    return told


def test_the_status_document_says_who_holds_it_and_what_the_way_back_waits_for() -> None:
    told = document()
    assert told["held"] is True
    assert told["hold"] == {
        "by": "ada",
        "reason": "benchmark",
        "since": "2026-12-01T09:00:00.000Z",
        "until": "2026-12-02T01:00:00.000Z",
    }
    # The hold ends at 01:00 UTC, which is 02:00 here: the window is open.
    assert told["next"] == {"what": "a step up, once the hold is over", "at": told["hold"]["until"], "earliest": True}
    (below,) = told["way_back"]["levers"]
    assert {**below, "why": ""} == {
        "lever": "max_model_len",
        "now": 30000,
        "declared": 65536,
        "why": "",
        "climbs": True,
    }
    assert told["way_back"]["at"] == told["hold"]["until"]
    assert told["memory"][0]["growth"] == {
        "bytes_per_hour": 210 * MIB,
        "low": 180 * MIB,
        "high": 240 * MIB,
        "hours": 4.0,
        "creeps": True,
    }


def test_without_the_hold_the_next_window_is_named() -> None:
    told = document(replace(STATE, hold=None))
    assert told["hold"] is None
    assert told["next"]["what"] == "a step up, within 02:00-05:00 local time"
    assert told["next"]["at"] == "2026-12-02T01:00:00.000Z"
    assert document(replace(STATE, launch=replace(LAUNCH, levers=DECLARED, target=DECLARED)))["way_back"] is None


def test_a_person_reads_it_in_status_and_explain() -> None:
    status = " ".join(render(document(), WALL, 100).split())
    assert "held by ada (benchmark) since 2026-12-01 09:00:00 UTC (1 h ago) until 2026-12-02 01:00:00 UTC" in status
    assert "grows 210 MiB/h (95 %: 180 MiB to 240 MiB, seen over 4.0 h)" in status
    assert "a step up, once the hold is over, not before 2026-12-02 01:00:00 UTC (in 15 h)" in status
    explained = " ".join(render_explanation(document(), WALL).split())
    assert "below max_model_len 30,000, declared 65,536: a failure lowered it" in explained
    assert "way back a step up, once the hold is over, not before 2026-12-02 01:00:00 UTC (in 15 h)" in explained
    assert "hold held by ada (benchmark)" in explained
    still = document()
    still["memory"][0]["growth"]["creeps"] = False
    assert "grows" not in render(still, WALL, 100)


def test_prometheus_reads_the_growth_in_base_units_and_the_hold() -> None:
    page = Exporter(Daemon(), "1").page().decode()  # type: ignore[arg-type]  # only asked for a snapshot
    samples = {
        (sample.name, sample.labels.get("bound")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.endswith(("_held", "growth_bytes_per_second"))
    }
    assert samples == {
        ("vllm_supervise_held", None): 1,
        ("vllm_supervise_memory_growth_bytes_per_second", "estimate"): 210 * MIB / 3600,
        ("vllm_supervise_memory_growth_bytes_per_second", "low"): 180 * MIB / 3600,
        ("vllm_supervise_memory_growth_bytes_per_second", "high"): 240 * MIB / 3600,
    }


def test_check_says_when_planned_changes_may_begin_and_what_time_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "qwen.toml"
    policy.write_text('schema = 1\n[engine]\nmodel = "m"\n[step-up]\nwindow = ["02:00-05:00", "13:00-14:00"]\n')
    monkeypatch.setenv("TZ", "XXX-01:00")
    shown = CliRunner().invoke(app, ["check", "--config", str(policy)])
    assert shown.exit_code == 0, shown.output
    assert "a step up after 30m of serving, within 02:00-05:00 or 13:00-14:00 local time (now " in shown.output
    assert "at most 4 planned restarts a day" in shown.output
    report = json.loads(CliRunner().invoke(app, ["check", "--config", str(policy), "--json"]).output)
    assert report["planned"] == {
        "after_s": 1800,
        "windows": ["02:00-05:00", "13:00-14:00"],
        "per_day": 4,
        "recycle": False,
    }
    policy.write_text('schema = 1\n[engine]\nmodel = "m"\n')
    assert "of serving, at a quiet moment" in CliRunner().invoke(app, ["check", "--config", str(policy)]).output
