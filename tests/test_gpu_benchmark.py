"""The pure parts of `benchmarks.gpu`: seconds by part, what fills a card, what must hold, the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import rig as rigs
from benchmarks.gpu.faults import Story, checks, every
from benchmarks.gpu.load import Answer, ask, summary
from benchmarks.gpu.neighbour import GIB, MIB, Neighbour, NeighbourError, leave
from benchmarks.gpu.result import generalised, table
from benchmarks.gpu.supervised import Record, policy_text
from benchmarks.gpu.timeline import Json, Named, context_mib, own_share, parts, times
from daemon_process import free_port
from supervisord_vllm.config import load
from supervisord_vllm.simulation.shared_card import SharedCard

S = 1_000_000_000


def device(free: int, pid: int = 7) -> Json:
    return {
        "device": "GPU-1",
        "total_bytes": 140 * GIB,
        "free_bytes": free,
        "own_bytes": 0,
        "holders": [{"pid": pid, "memory_bytes": 140 * GIB - free, "ours": False}],
    }


def facts() -> list[Named]:
    """A launch that serves and dies, and the one after it."""
    return [
        ("GateSampled", {"at_ns": 1 * S, "launch": 1, "devices": [device(139 * GIB)]}),
        ("GateSampled", {"at_ns": 3 * S, "launch": 1, "devices": [device(139 * GIB)]}),
        ("Spawned", {"at_ns": 4 * S, "launch": 1}),
        ("LedgerSeen", {"at_ns": 9 * S, "launch": 1, "numbers": {"free_gib": 138.5}}),
        ("HealthSeen", {"at_ns": 5 * S, "launch": 1, "status": None}),
        ("HealthSeen", {"at_ns": 50 * S, "launch": 1, "status": 200}),
        ("CanaryDone", {"at_ns": 51 * S, "launch": 1, "ok": True}),
        ("FatalSeen", {"at_ns": 101 * S, "launch": 1}),
        ("Exited", {"at_ns": 103 * S, "launch": 1, "code": 0, "signal": None}),
        (
            "Diagnosed",
            {"at_ns": 104 * S, "launch": 1, "diagnosis": {"kind": "oom_runtime"}, "after": [device(80 * GIB)]},
        ),
        ("TreeEnded", {"at_ns": 104 * S, "launch": 1}),
        ("Tick", {"at_ns": 104 * S, "launch": 0}),
        ("GateSampled", {"at_ns": 105 * S, "launch": 2, "devices": []}),
        ("Spawned", {"at_ns": 107 * S, "launch": 2}),
        ("HealthSeen", {"at_ns": 160 * S, "launch": 2, "status": 200}),
        ("CanaryDone", {"at_ns": 161 * S, "launch": 2, "ok": True}),
    ]


def test_a_recovery_is_cut_into_its_parts() -> None:
    first, second = times(facts())
    assert parts(second, first, 100 * S) == {
        "fault_to_noticed": 1.0,
        "noticed_to_exit": 2.0,
        "exit_to_gate": 2.0,
        "gate_to_spawn": 2.0,
        "spawn_to_healthy": 53.0,
        "healthy_to_ready": 1.0,
        "spawn_to_exit": None,
    }
    assert (first.exit, first.kind, second.exit) == ("0", "oom_runtime", "")


def test_no_answer_before_the_first_200_is_no_sign_of_a_failure() -> None:
    first = times(facts())[0]
    assert first.noticed == 101 * S


def test_the_supervisors_own_share_leaves_out_gates_that_waited_for_a_neighbour() -> None:
    launches = times(facts())
    assert own_share(launches, 5 * S) == {
        "exit_to_spawn": [4.0],
        "exit_to_spawn_with_a_wait": [],
        "healthy_to_ready": [1.0, 1.0],
    }
    assert own_share(launches, 2 * S)["exit_to_spawn_with_a_wait"] == [4.0]


def test_the_engines_context_is_what_was_free_at_the_gate_less_what_vllm_saw() -> None:
    assert context_mib(times(facts())[0]) == 512
    assert context_mib(times(facts())[1]) is None


class Fragmented:
    """Memory that is refused in pieces above its largest block."""

    def __init__(self, free: int, block: int) -> None:
        self.left, self.block = free, block

    def take(self, size: int) -> bool:
        if size > min(self.block, self.left):
            return False
        self.left -= size
        return True

    def free(self) -> int:
        return self.left


@pytest.mark.parametrize("block", [64 * GIB, GIB, 6 * MIB])
def test_a_neighbour_fills_a_card_whose_memory_is_in_pieces(block: int) -> None:
    memory = Fragmented(20 * GIB + 3 * MIB, block)
    assert 96 * MIB <= leave(memory, 96 * MIB) < 98 * MIB


def test_a_neighbour_never_takes_what_it_was_told_to_leave() -> None:
    memory = Fragmented(50 * MIB, GIB)
    assert leave(memory, 96 * MIB) == 50 * MIB


def test_a_neighbour_holds_memory_of_a_card_while_it_lives(tmp_path: Path) -> None:
    rig = rigs.standin(tmp_path)
    card = SharedCard(tmp_path / "card.json")
    with Neighbour(rig.where) as neighbour:
        assert neighbour.hold(rig.neighbour) == card.free()
        held = rig.neighbour + card.card().device.context
        assert [(holder.pid, holder.bytes) for holder in card.holders()] == [(neighbour.pid, held)]
        assert rig.left <= neighbour.leave(rig.left) < rig.left + 2 * MIB
        with pytest.raises(NeighbourError, match="refused"):
            neighbour.hold(GIB)
    assert card.holders() == ()


def test_a_request_that_nobody_answers_is_lost() -> None:
    lost = ask(free_port(), 4, 4, 5.0)
    assert (lost.ok, lost.error) == (False, "ConnectionRefusedError")
    answers = [Answer(S, True, 0.1), Answer(2 * S, False, 0.1, "HTTP 500"), Answer(5 * S, False, 0.1, "HTTP 500"), lost]
    assert summary(answers[:3]) == {"sent": 3, "failed": 2, "failing_for_s": 3.0, "errors": {"HTTP 500": 2}}
    assert summary([]) == {"sent": 0, "failed": 0, "failing_for_s": 0.0, "errors": {}}


@pytest.mark.parametrize("make", ["gpu", "cpu", "standin"])
def test_every_rigs_policies_are_valid(make: str, tmp_path: Path) -> None:
    made = {
        "gpu": rigs.gpu(["vllm", "serve"], "m"),
        "cpu": rigs.cpu(["vllm", "serve"], "m"),
        "standin": rigs.standin(tmp_path),
    }
    rig = made[make]
    ladder = [{"lever": "gpu-memory-utilization", "step": 0.05, "min": rig.floor, "max": 0.95}]
    text = policy_text(rig, tmp_path, (8001, 8002), {"gpu-memory-utilization": rig.declared}, ladder, rig.long_args[2:])
    (tmp_path / "policy.toml").write_text(text)
    settings = load(tmp_path / "policy.toml", environ={})
    assert settings.policy.declared.number("gpu_memory_utilization") == round(rig.declared * 1000)
    assert settings.memory.source == ("card" if make == "standin" else rig.memory) or settings.memory.card is not None


def decision(
    kind: str, moves: list[Json], launch: int = 1, sentence: str = "pid 7 (python) … `vllm-supervise hold`"
) -> Json:
    return {"kind": kind, "launch": launch, "moves": moves, "sentence": sentence, "action": "next_config"}


def move(direction: str, how: str = "computed") -> Json:
    return {"lever": "gpu_memory_utilization", "direction": direction, "how": how, "from": 0.9, "to": 0.7}


def broken(number: int, record: Record, tmp_path: Path, **story: object) -> list[str]:
    """The checks that do not hold."""
    told = Story(rigs.gpu([], "m"), tmp_path, 0.0, lambda _what, _daemon: None)
    told.answers = [Answer(0, True, 0.1)]
    for name, value in story.items():
        setattr(told, name, value)
    return [what for what, holds in checks(every(None)[number], told, record) if not holds]


def test_a_fault_that_went_as_it_must_breaks_no_check(tmp_path: Path) -> None:
    spawned: list[Named] = [("Spawned", {"launch": 1})]
    assert broken(1, Record({}, spawned, [decision("gpu_busy_foreign", [move("down")])]), tmp_path) == []


@pytest.mark.parametrize(
    ("number", "kinds", "moves", "launches", "what"),
    [
        (1, "gpu_busy_foreign", [move("down")], 2, "1 launch(es)"),
        (1, "oom_runtime", [move("down")], 1, "kinds are of ['gpu_busy_foreign']"),
        (1, "gpu_busy_foreign", [move("down", "stepped")], 1, "the utilization went down, computed, once"),
        (5, "kv_no_blocks", [move("down")], 2, "the utilization went up, computed, once"),
        (2, "gpu_busy_foreign", [move("down")], 2, "the verdict names the runtime OOM"),
    ],
)
def test_what_went_otherwise_breaks_its_check(
    number: int, kinds: str, moves: list[Json], launches: int, what: str, tmp_path: Path
) -> None:
    spawned: list[Named] = [("Spawned", {"launch": launch + 1}) for launch in range(launches)]
    assert what in broken(number, Record({}, spawned, [decision(kinds, moves)]), tmp_path)


def test_an_engine_that_does_not_answer_at_the_end_breaks_a_check(tmp_path: Path) -> None:
    record = Record({}, [("Spawned", {"launch": 1})], [decision("gpu_busy_foreign", [move("down")])])
    assert broken(1, record, tmp_path, answers=[Answer(0, False, 0.1)]) == ["requests are answered at the end"]
    assert broken(1, record, tmp_path, answers=[]) == ["requests are answered at the end"]


def test_paths_of_the_machine_are_taken_out_the_longest_first() -> None:
    assert generalised("/a/b/model and /a/b", {"/a/b": "<run>", "/a/b/model": "<model>"}) == "<model> and <run>"


def test_the_table_has_a_row_for_every_fault_and_later_folders_win(tmp_path: Path) -> None:
    result: Json = {
        "fault": 2,
        "title": "a neighbour grows",
        "as_it_must": False,
        "requests": {"sent": 40, "failed": 10},
        "long_requests": {"sent": 8, "failed": 8},
        "own_share": {"exit_to_spawn": [2.5], "healthy_to_ready": [0.1, 0.3]},
        "decisions": [decision("oom_runtime", [move("down")])],
        "observed": {"after the daemon's end": {"sampler": {"free_bytes": 139 * GIB}}},
        "launches": [
            {"number": 1, "seconds": {}, "memory_after": [{"free_bytes": 80 * GIB}]},
            {"number": 2, "seconds": {"fault_to_noticed": 1.5, "spawn_to_healthy": 60.0}, "memory_after": []},
        ],
    }
    for name, good in (("one", False), ("two", True)):
        (tmp_path / name / "fault-2").mkdir(parents=True)
        (tmp_path / name / "fault-2" / "result.json").write_text(json.dumps({**result, "as_it_must": good}))
    text = table([tmp_path / "one"])
    assert "| 2 a neighbour grows | 2 | 1.5 | – | – | – | 60.0 | – | 18 of 48 |" in text
    assert "not as it must" in text
    assert text.splitlines()[2].endswith("| 80.0, 139.0 GiB |")
    assert "exit → spawn 2.5 s (1 recoveries that waited for nobody), healthy → ready 0.2 s (2 starts)" in text
    assert "not as it must" not in table([tmp_path / "one", tmp_path / "two"])
