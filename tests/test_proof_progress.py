"""How far a proof is, as programs and people read it: the ``proof`` object, bars, one line for systemd; its watch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from supervisord_vllm.cli.status import render
from supervisord_vllm.clock import Now
from supervisord_vllm.core.actions import Weigh
from supervisord_vllm.core.facts import BurstDone, DeviceMemory, DeviceSoak, Fact, SoakDone
from supervisord_vllm.core.ledger import GIB, MIB
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.policy import SECOND, Policy, Proof
from supervisord_vllm.core.soaking import Soaking
from supervisord_vllm.core.state import Ending, Launch, State, StateName
from supervisord_vllm.proof_bars import bar, line, percents, summary
from supervisord_vllm.proof_progress import Flying, document
from supervisord_vllm.proofwatch import ProofWatch
from supervisord_vllm.status import headline, snapshot_of, status_document

POLICY = Policy("qwen", Levers({"max_num_seqs": 16, "gpu_memory_utilization": 900}), proof=Proof(), soak_ns=40 * SECOND)
HEALTHY = Launch(3, POLICY.declared, POLICY.declared, 0, healthy_ns=SECOND)
READY = replace(HEALTHY, ready=True, ready_ns=2 * SECOND, first_token_s=0.21)
BURST = BurstDone(at_ns=10 * SECOND, ok=True, requests=16, answered=14, refused=2, seconds=7.5, first_token_s=0.4)
SOAKING = replace(READY, burst=BURST)


def state(launch: Launch, name: StateName = StateName.PROVING) -> State:
    return State(name=name, launch=launch)


def shown(launch: Launch, now_s: float = 20, flying: Flying | None = None) -> dict[str, Any]:
    made = document(POLICY, state(launch), round(now_s * SECOND), flying)
    assert made is not None
    return made


def test_each_part_has_its_percentage() -> None:
    assert document(POLICY, state(replace(HEALTHY, healthy_ns=None)), SECOND) is None, "it does not answer yet"
    assert (shown(HEALTHY)["part"], percents(shown(HEALTHY))) == ("canary", {"canary": 0, "burst": 0, "soak": 0})
    flying = shown(READY, flying=Flying(5, yields=True))
    assert (flying["part"], percents(flying)) == ("burst", {"canary": 100, "burst": 31, "soak": 0})
    assert (flying["burst"]["done"], flying["burst"]["yields"], flying["burst"]["ok"]) == (5, True, None)
    soaking = shown(SOAKING)
    assert (soaking["part"], percents(soaking)) == ("soak", {"canary": 100, "burst": 100, "soak": 25})
    assert (soaking["burst"]["answered"], soaking["burst"]["refused"], soaking["burst"]["done"]) == (14, 2, 16)
    proven = shown(replace(SOAKING, proven=True))
    assert (proven["part"], percents(proven)) == (None, {"canary": 100, "burst": 100, "soak": 100})


def test_a_policy_without_a_burst_has_no_bar_for_one() -> None:
    made = document(replace(POLICY, proof=Proof(concurrency=0)), state(READY), 12 * SECOND)
    assert made is not None
    assert (made["part"], made["burst"], percents(made)) == ("soak", None, {"canary": 100, "soak": 25})


def test_the_bars_are_as_long_as_the_part_is_done() -> None:
    assert [bar(percent) for percent in (0, 9, 50, 100, 170)] == ["░" * 10, "░" * 10, "█████░░░░░", "█" * 10, "█" * 10]
    assert bar(30, plain=True) == "###......."
    flying = line(shown(READY, flying=Flying(5, yields=True)))
    assert flying == "canary ██████████  burst ███░░░░░░░ 5 of 16, yields to real traffic  soak ░░░░░░░░░░"
    assert line(shown(SOAKING)).endswith("soak ██░░░░░░░░ 25 %")


def test_a_proof_that_is_over_says_what_it_measured() -> None:
    told = summary(shown(SOAKING))
    assert told == "first token after 0.21 s; 14 of 16 at once answered in 7.5 s, first token 0.40 s (median)"


def test_what_the_soak_found_is_said_with_its_numbers() -> None:
    device = DeviceSoak("GPU-0", 80 * GIB, GIB // 2, 72 * GIB, 72 * GIB, 72 * GIB, 8 * GIB, 100 * MIB, 15, 4.0)
    made = shown(replace(SOAKING, soak=SoakDone(at_ns=50 * SECOND, devices=(device,)), proven=True))
    assert made["soak"]["finding"].startswith("100 MiB are left of GPU-0")
    assert made["soak"]["memory"] == [
        {
            "gpu": "GPU-0",
            "own_bytes": 72 * GIB,
            "own_most_bytes": 72 * GIB,
            "growth_bytes": 0,
            "free_bytes": 100 * MIB,
            "slope_bytes_per_hour": 4.0,
        }
    ]
    assert "memory: 100 MiB are left" in summary(made)


def test_status_and_systemds_line_follow_the_proof() -> None:
    now = Now(boottime_ns=20 * SECOND, wall=1e9)
    snapshot = replace(snapshot_of(POLICY, state(SOAKING), now), proof=shown(SOAKING))
    assert "soak 25 %" in headline(snapshot)
    assert status_document(snapshot)["proof"]["soak"]["percent"] == 25
    assert "proof       canary" in render(status_document(snapshot), 1e9)
    later = replace(snapshot_of(POLICY, state(replace(SOAKING, proven=True), StateName.SERVING), now))
    later = replace(later, proof=shown(replace(SOAKING, proven=True)))
    assert "14 of 16 at once answered" in render(status_document(later), 1e9)
    assert "%" not in headline(later)


# --- the watch ---


def device(own: int, free: int = 8 * GIB) -> tuple[DeviceMemory, ...]:
    return (DeviceMemory("GPU-0", 80 * GIB, free, GIB // 2, own),)


class Watched:
    """A watch over one state; `Memory` samples what it is given."""

    error: str | None = None

    def __init__(self, *samples: tuple[DeviceMemory, ...], flying: Flying | None = None) -> None:
        self.state = state(SOAKING)
        self.samples = list(samples)
        self.flying = flying
        self.posted: list[Fact] = []
        self.told = 0
        self.failed: list[str] = []
        self.watch = ProofWatch(
            POLICY, self, self.posted.append, lambda: self.state, lambda: self.flying, self.tell, self.failed.append
        )

    def tell(self) -> None:
        self.told += 1

    async def once(self) -> None:
        self.watch.sampled(self.samples.pop(0))


def test_the_soak_is_weighed_from_its_own_samples_and_one_more_look() -> None:
    it = Watched(device(74 * GIB, 6 * GIB))
    it.state = state(READY)
    it.watch.sampled(device(60 * GIB))  # of the burst: says nothing
    it.state = state(SOAKING)
    for own in (70, 71, 72):
        it.watch.sampled(device(own * GIB))
    asyncio.run(it.watch.weigh(Weigh(3)))
    (done,) = it.posted
    assert isinstance(done, SoakDone)
    (seen,) = done.devices
    assert (seen.own_first_bytes, seen.own_last_bytes, seen.samples) == (70 * GIB, 74 * GIB, 4)
    assert (seen.growth_bytes, seen.free_last_bytes) == (4 * GIB, 6 * GIB)
    assert (done.launch, done.error) == (3, None)


def test_memory_that_cannot_be_read_is_an_answer_too() -> None:
    it = Watched(())
    it.error = "NVML does not answer"
    asyncio.run(it.watch.weigh(Weigh(3)))
    (done,) = it.posted
    assert isinstance(done, SoakDone)
    assert (done.devices, done.error) == ((), "NVML does not answer")


def test_people_are_told_of_every_quarter_and_no_more_often() -> None:
    it = Watched()
    it.state = state(READY)
    for done in range(17):
        it.flying = Flying(done)
        it.watch.moved()
        it.watch.moved()
    assert it.told == 5


def test_a_failed_proof_is_counted_by_its_part() -> None:
    it = Watched()
    after = replace(state(SOAKING, StateName.STOPPING), ending=Ending("failure", 0))
    it.watch.noted(state(READY), after, BURST)
    it.watch.noted(state(SOAKING), after, BURST)
    it.watch.noted(state(SOAKING), replace(after, ending=Ending("operator", 0)), BURST)
    assert it.failed == ["burst", "soak"]


def test_the_slope_is_a_least_squares_line_through_own_use() -> None:
    soaking = Soaking()
    for second in range(0, 30, 2):
        soaking = soaking.sampled(second * SECOND, device(70 * GIB + second * MIB))
    (seen,) = soaking.devices
    assert seen.slope_bytes_per_hour is not None
    assert abs(seen.slope_bytes_per_hour - 3600 * MIB) < MIB
    flat = Soaking().sampled(0, device(0)).sampled(SECOND, device(0)).sampled(2 * SECOND, device(0))
    assert flat.devices[0].slope_bytes_per_hour is None, "own use is not told"
