"""The status and history documents: names as documented, from a daemon and from the store, and what people read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisord_vllm.cli.history import render_explanation, render_history
from supervisord_vllm.cli.status import render, span, when
from supervisord_vllm.clock import Now, parse_rfc3339, rfc3339
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Action, Evidence, Kind
from supervisord_vllm.core.facts import DeviceMemory, Hold, ProcessRef
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.policy import Policy, Pressure
from supervisord_vllm.core.state import Launch, State, StateName
from supervisord_vllm.engine.metrics import EngineLoad
from supervisord_vllm.status import (
    NO_DAEMON,
    LaunchView,
    Snapshot,
    degraded_levers,
    headline,
    history_document,
    snapshot_of,
    status_document,
    status_from_history,
    why_not_ready,
)
from supervisord_vllm.store import History, Store
from supervisord_vllm.strain import Strained

GIB = 1 << 30
WALL = parse_rfc3339("2026-12-01T12:00:00Z")
NOW = Now(boottime_ns=10_000 * 10**9, wall=WALL)
DECLARED = Levers({"gpu_memory_utilization": 900, "max_model_len": 8192, "max_num_seqs": 16})
RUNNING = DECLARED.with_(gpu_memory_utilization=741)
DECISION = Decision(
    number=3,
    at_ns=NOW.boottime_ns - 8000 * 10**9,
    launch=1,
    kind=Kind.GPU_BUSY_FOREIGN,
    action=Action.NEXT_CONFIG,
    sentence="Launch 1 was refused by vLLM; pid 2712 (python) holds 20.00 GiB. Utilization 0.900 → 0.741.",
    moves=(Move("gpu_memory_utilization", 900, 741, "down", "computed"),),
    evidence=(Evidence(55, "EngineCore", "ValueError: Free memory on device"),),
    arithmetic="free 60.0 GiB - 0.15 GiB = 0.741 * 80.0 GiB",
    skipped=("max_num_seqs: cannot free memory that another process holds",),
)
SNAPSHOT = Snapshot(
    name="qwen",
    now=NOW,
    state="serving",
    since_ns=NOW.boottime_ns - 7230 * 10**9,
    declared=DECLARED,
    ready=True,
    proven=True,
    launch=LaunchView(
        2, RUNNING, ("vllm", "serve", "m"), 4123, NOW.boottime_ns - 7300 * 10**9, "/state/launches/000002.log"
    ),
    memory=(DeviceMemory("GPU 0", 80 * GIB, GIB, GIB // 2, 59 * GIB, (ProcessRef(2712, "bob", "python", 20 * GIB),)),),
    load=EngineLoad(running=4, waiting=0, kv_usage=0.25, preemptions_total=2),
    decision=DECISION,
    outcome="launch 2 serves",
    next_what="nothing: it serves",
    budget_left=5,
    window_s=3600,
    pid=77,
    version="0.1.0",
)


def test_the_status_document_has_the_documented_names() -> None:
    document = json.loads(json.dumps(status_document(SNAPSHOT), allow_nan=False))
    assert set(document) >= {
        *("schema", "name", "state", "since", "ready", "proven", "held", "launch", "declared", "degraded"),
        *("memory", "load", "decision", "next", "budget"),
    }
    assert document["schema"] == 1
    assert document["since"] == "2026-12-01T09:59:30.000Z"
    assert document["degraded"] is True
    assert document["degraded_levers"] == ["gpu_memory_utilization"]
    launch = document["launch"]
    assert set(launch) >= {"number", "levers", "argv", "pid", "started_at", "log"}
    assert launch["levers"] == {"gpu_memory_utilization": 0.741, "max_model_len": 8192, "max_num_seqs": 16}
    (device,) = document["memory"]
    assert set(device) == {"gpu", "total_bytes", "free_bytes", "requested_bytes", "own_bytes", "growth", "holders"}
    assert device["requested_bytes"] == -(-741 * 80 * GIB // 1000)
    assert device["holders"][0]["pid"] == 2712
    assert document["load"]["running"] == 4
    assert document["next"] == {"what": "nothing: it serves", "at": None, "earliest": True}
    assert document["budget"] == {"left": 5, "window_s": 3600}
    decision = document["decision"]
    assert set(decision) >= {
        *("number", "at", "launch", "kind", "action", "moves", "target", "evidence", "arithmetic", "sentence"),
        "outcome",
    }
    assert decision["moves"] == [
        {"lever": "gpu_memory_utilization", "from": 0.9, "to": 0.741, "direction": "down", "how": "computed"}
    ]
    assert decision["evidence"] == [{"line": 55, "role": "EngineCore", "text": "ValueError: Free memory on device"}]
    assert decision["at"] == "2026-12-01T09:46:40.000Z"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ()),
        ({"gpu_memory_utilization": 950}, ()),
        ({"gpu_memory_utilization": 899}, ("gpu_memory_utilization",)),
        ({"max_model_len": 4096, "max_num_seqs": 8}, ("max_model_len", "max_num_seqs")),
        ({"enforce_eager": True}, ("enforce_eager",)),
        ({"enforce_eager": False}, ()),
        ({"max_num_batched_tokens": 512}, ()),
    ],
)
def test_degraded_means_below_what_was_declared(change: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert degraded_levers(DECLARED, DECLARED.with_(**change)) == expected


def test_a_snapshot_says_what_the_core_knows() -> None:
    policy = Policy(name="qwen", declared=DECLARED)
    launch = Launch(2, RUNNING, DECLARED, 5, pid=9, ready=True, ready_ns=7, proven=True, log="l", argv=("vllm",))
    serving = State(name=StateName.SERVING, since_ns=8, launch=launch, hold=Hold(), last_decision=DECISION)
    snapshot = snapshot_of(policy, serving, NOW)
    assert (snapshot.state, snapshot.ready, snapshot.proven, snapshot.held) == ("serving", True, True, True)
    assert snapshot.launch == LaunchView(2, RUNNING, ("vllm",), 9, 5, "l", "importing")
    assert snapshot.budget_left == policy.budget
    assert why_not_ready(snapshot) == ""
    draining = snapshot_of(policy, replace(serving, name=StateName.DRAINING), NOW)
    assert draining.launch == snapshot.launch  # it still answers what it has taken
    given_up = replace(serving, name=StateName.GIVEN_UP, given_up="this card cannot run this model")
    snapshot = snapshot_of(policy, given_up, NOW)
    assert snapshot.launch is None
    assert not snapshot.ready
    assert why_not_ready(snapshot) == "given-up: this card cannot run this model"


def test_every_state_of_the_core_makes_a_document_that_reads() -> None:
    policy = Policy(name="qwen")
    for name in StateName:
        document = status_document(snapshot_of(policy, State(name=name, since_ns=NOW.boottime_ns), NOW))
        assert document["state"] == name.value
        assert name.value in render(document, WALL)


def test_a_person_reads_the_state_the_cause_and_what_is_next() -> None:
    assert render(status_document(SNAPSHOT), WALL, width=100).splitlines() == [
        "qwen: serving, ready, proven, below what was declared, since 2026-12-01 09:59:30 UTC (2 h ago)",
        "  launch 2    pid 4123, started 2026-12-01 09:58:20 UTC (2 h 1 min ago)",
        "  levers      gpu_memory_utilization 0.741 (declared 0.900), max_model_len 8,192, max_num_seqs 16",
        "  log         /state/launches/000002.log",
        "  GPU 0       1.00 GiB of 80.00 GiB free, 59.28 GiB requested, ours 59.00 GiB, pid 2712 (python)",
        "              holds 20.00 GiB",
        "  load        4 running, 0 waiting, KV cache 25% used, 2 preemptions since its start",
        "  decision 3  2026-12-01 09:46:40 UTC (2 h 13 min ago): Launch 1 was refused by vLLM; pid 2712",
        "              (python) holds 20.00 GiB. Utilization 0.900 → 0.741. Outcome: launch 2 serves.",
        "  next        nothing: it serves",
        "  budget      5 same-again restarts left in 1 h",
    ]


def test_a_given_up_instance_says_so_first() -> None:
    given_up = replace(SNAPSHOT, state="given-up", ready=False, proven=False, launch=None, held=True)
    snapshot = replace(given_up, given_up="This card cannot run it.")
    first = render(status_document(snapshot), WALL).splitlines()[0]
    assert first.startswith("qwen: given-up, held, since")
    assert "This card cannot run it." in render(status_document(snapshot), WALL).replace("\n ", "")


def test_slowness_is_told_with_what_it_has_cost_and_what_helps() -> None:
    pressure = {"verdict": "slot", "curable": True, "loss": 0.54, "lost_s": 12.4, "worth_s": 22.0, "judging": False}
    text = " ".join(render({**status_document(SNAPSHOT), "pressure": pressure}, WALL).split())
    assert (
        "pressure 12 s lost so far: 54% of the service is late now, bound by the number of sequences; a restart pays at"
        " 22 s of outage" in text
    )
    calm = render({**status_document(SNAPSHOT), "pressure": {**pressure, "lost_s": 0.0}}, WALL)
    assert "pressure" not in calm


def test_foreign_text_cannot_steer_the_terminal() -> None:
    decision = replace(
        DECISION,
        sentence="\x1b[2Jgone \x07",
        evidence=(Evidence(1, "x", "\x1b]0;title\x07text\u202e"),),
        arithmetic="\x1b[31m",
        skipped=("\x9b2J",),
    )
    snapshot = replace(SNAPSHOT, decision=decision, memory=(replace(SNAPSHOT.memory[0], device="\x1b[1m"),))
    document = status_document(snapshot)
    for text in (render(document, WALL), render_explanation(document, WALL)):
        assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_an_explanation_tells_the_decision_in_full() -> None:
    text = render_explanation(status_document(SNAPSHOT), WALL)
    for part in (
        "decision 3 on launch 1",
        "pid 2712 (python) holds 20.00 GiB",
        "gpu_busy_foreign → next_config",
        "gpu_memory_utilization 0.900 → 0.741 (down, computed)",
        "line 55 (EngineCore): ValueError: Free memory on device",
        "free 60.0 GiB - 0.15 GiB = 0.741 * 80.0 GiB",
        "max_num_seqs: cannot free memory",
        "launch 2 serves",
        "nothing: it serves",
    ):
        assert part in text
    assert "no decision has been made" in render_explanation(status_document(replace(SNAPSHOT, decision=None)), WALL)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "history.sqlite3"
    warnings: list[str] = []
    store = Store.open(path, warn=warnings.append)
    store.start_run(Policy(name="qwen", declared=DECLARED), "0.1.0", "boot")
    store.launch_started(1, DECLARED, ["vllm"], 10, "launches/000001.log")
    store.launch_ended(1, "gpu_busy_foreign", code=1)
    store.record_decision(DECISION)
    store.complete_decision(3, "launch 2")
    store.launch_started(2, RUNNING, ["vllm"], 11, "launches/000002.log")
    store.launch_ready(2)
    assert store.close()
    assert warnings == []
    return path


def test_without_a_daemon_the_store_tells_what_was(recorded: Path) -> None:
    history = History.open(recorded)
    assert history is not None
    document = json.loads(json.dumps(status_from_history("qwen", history)))
    told = json.loads(json.dumps(history_document("qwen", history)))
    history.close()
    assert set(document) == set(status_document(SNAPSHOT))
    assert document["state"] == NO_DAEMON
    assert document["declared"] == DECLARED.to_json()
    assert document["launch"]["number"] == 2
    assert document["decision"]["sentence"] == DECISION.sentence
    assert document["decision"]["outcome"] == "launch 2"
    text = render(document, WALL)
    assert text.startswith("qwen: no daemon runs")
    assert "its end is not recorded" in " ".join(text.split())
    assert "no daemon runs; decision 3" in render_explanation(document, WALL)
    assert [launch["number"] for launch in told["launches"]] == [1, 2]
    assert told["launches"][0]["outcome"] == "gpu_busy_foreign"
    assert [decision["number"] for decision in told["decisions"]] == [3]
    story = render_history(told)
    assert story.index("launch 1 ") < story.index("decision 3") < story.index("launch 2 ")
    assert "Utilization 0.900 → 0.741" in story.replace("\n              ", " ")


def test_an_empty_history_says_so() -> None:
    assert render_history({"name": "qwen", "launches": [], "decisions": []}) == "qwen: nothing has happened yet"


def test_times_are_told_in_utc_with_their_distance() -> None:
    assert rfc3339(WALL + 0.25) == "2026-12-01T12:00:00.250Z"
    assert parse_rfc3339("2026-12-01T12:00:00.250Z") == WALL + 0.25
    assert NOW.show(NOW.boottime_ns + 1_500_000_000) == "2026-12-01T12:00:01.500Z"
    assert when("2026-12-01T11:59:00.000Z", WALL) == "2026-12-01 11:59:00 UTC (60 s ago)"
    assert when("2026-12-01T12:10:00.000Z", WALL) == "2026-12-01 12:10:00 UTC (in 10 min)"
    assert when("nonsense", WALL) == "nonsense"
    assert [span(seconds) for seconds in (5, 119, 120, 8040, 7200, 200_000)] == [
        *("5 s", "119 s", "2 min", "2 h 14 min", "2 h", "2 d 7 h"),
    ]


def test_systemds_line_says_the_phase_the_levers_and_what_is_next() -> None:
    levers = "gpu_memory_utilization 0.741, max_model_len 8,192, max_num_seqs 16"
    assert headline(SNAPSHOT) == f"serving, launch 2 ({levers})"
    coming = replace(SNAPSHOT, state="proving", next_what="a canary")
    assert headline(coming) == f"proving, launch 2 ({levers}): a canary"
    assert headline(replace(SNAPSHOT, state="given-up", launch=None, given_up="Why.")) == "given-up: Why."
    assert headline(replace(SNAPSHOT, state="gating", launch=None, next_what="")) == "gating"


def test_pressure_is_told_with_its_targets_and_its_price() -> None:
    strained = Strained(
        "learnt", Pressure(ttft_ns=5 * 10**9), "kv", True, 0.42, 71.25, 120.0, 1.66, judging=False, missed=2
    )
    document = status_document(replace(SNAPSHOT, strained=strained))
    assert document["pressure"] == {
        "targets": {"ttft_p95_s": 5.0, "inter_token_p95_s": None, "queue_p95_s": None},
        "origin": "learnt",
        "verdict": "kv",
        "curable": True,
        "loss": 0.42,
        "lost_s": 71.2,
        "worth_s": 120.0,
        "engines_needed": 1.7,
        "judging": False,
        "missed_pages": 2,
    }


def test_a_length_far_above_what_comes_is_said_once_enough_came() -> None:
    many = EngineLoad(running=4, waiting=0, request_success_total=12_000, longest_request=1500)
    told = render(status_document(replace(SNAPSHOT, load=many)), 0, 400)
    assert "max_model_len 8,192 is far above what comes: none of 12,000 requests had more than 1,500 tokens" in told
    for load in (replace(many, longest_request=2500), replace(many, request_success_total=999)):
        assert "far above" not in render(status_document(replace(SNAPSHOT, load=load)), 0, 400)
