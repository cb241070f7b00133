"""Real launches under the daemon on an H200 (vLLM 0.26.0): the classifier and `decide` on what was recorded there.

``fault-N`` is a whole run of `benchmarks.gpu`: the facts, the decisions and the policy of the store, and the engine's
output of every launch.
"""

from __future__ import annotations

import json
from functools import cache

import pytest

from benchmarks.gpu.result import results
from benchmarks.gpu.timeline import Json, middle, times
from labelled import CAPTURES, fed, raw_lines
from supervisord_vllm.core import codec
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.levers import UTILIZATION
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.policy import SECOND
from supervisord_vllm.core.state import State
from supervisord_vllm.replay import replay_facts
from supervisord_vllm.simulation.arguments import parse
from supervisord_vllm.simulation.card import read_card
from supervisord_vllm.simulation.console import Console
from supervisord_vllm.simulation.ledger import account
from supervisord_vllm.simulation.quantity import GIB
from supervisord_vllm.simulation.resolve import resolve

FOLDER = CAPTURES / "h200-supervised"
FAULTS = tuple(range(1, 7))
FAILED = {(2, 1): "oom_runtime", (3, 1): "gpu_busy_foreign", (4, 1): "kv_len_too_long", (5, 1): "kv_no_blocks"}
FAILED[6, 1] = "bad_config"


@cache
def record(fault: int) -> Json:
    found: Json = json.loads((FOLDER / f"fault-{fault}" / "record.json").read_text(encoding="utf-8"))
    return found


@cache
def decided(fault: int) -> tuple[Decision, ...]:
    """What the core of today decides on the facts of then."""
    facts = [codec.fact_from_json(name, fact) for name, fact in record(fault)["facts"]]
    return tuple(replay_facts(facts, codec.policy_from_json(record(fault)["policy"]), decide, State.initial()))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_recorded_is_judged_as_it_was_then(fault: int) -> None:
    then = [codec.from_json(Decision, decision) for decision in record(fault)["decisions"]]
    assert [shape(decision) for decision in decided(fault)] == [shape(decision) for decision in then]
    assert then
    for now, before in zip(decided(fault), then, strict=True):
        for move, earlier in zip(now.moves, before.moves, strict=True):
            # What served there must be what is chosen today, but for a margin that has become a little more careful.
            assert earlier.after - 2 <= move.after <= earlier.after  # type: ignore[operator]  # utilizations


def shape(decision: Decision) -> tuple[object, ...]:
    """A decision without the values that it computed."""
    moves = [(move.lever, move.before, move.direction, move.how) for move in decision.moves]
    return decision.launch, decision.kind, decision.action, moves


@pytest.mark.parametrize(("launch", "kind"), FAILED.items(), ids=str)
def test_the_output_of_a_failed_launch_names_its_kind(launch: tuple[int, int], kind: str) -> None:
    fault, number = launch
    status = next(one.exit for one in times(record(fault)["facts"]) if one.number == number)
    found = fed(raw_lines(FOLDER / f"fault-{fault}" / f"launch-{number}.log")).verdict(exit_code=int(status))
    assert found.kind.value == kind


def test_every_launch_that_failed_is_among_those_that_are_judged() -> None:
    failed = {(fault, one.number): one.kind for fault in FAULTS for one in times(record(fault)["facts"])}
    assert {launch: kind for launch, kind in failed.items() if kind not in ("", "none")} == FAILED


def test_a_runtime_oom_beside_a_neighbour_that_grew_is_the_neighbours() -> None:
    first, second = decided(2)
    assert (first.kind, first.action, first.moves) == (Kind.OOM_RUNTIME, Action.WAIT_VRAM, ())
    assert "took 55.63 GiB since the start" in first.sentence
    (move,) = second.moves
    assert (move.lever, move.before) == (UTILIZATION, 600)
    assert move.after in (592, 593)


def test_a_wait_that_is_not_made_is_not_announced() -> None:
    """0.8 GiB of 139.8 were missing: the gate does not wait for so little, and the sentence must not say it does."""
    first, second = decided(2)
    assert second.at_ns - first.at_ns < 5 * SECOND, "the policy's patience"
    assert "Too little is missing to wait: utilization 0.600 → 0.59" in first.sentence
    assert "Waiting up to" not in first.sentence
    assert "Waiting up to 5 s for memory" in decided(3)[0].sentence


def test_a_flag_that_vllm_does_not_know_is_not_blamed_on_a_lever() -> None:
    (decision,) = decided(6)
    assert "unrecognized arguments: --no-such-flag" in decision.sentence
    assert "max_model_len" not in decision.sentence


def test_every_fault_went_as_it_must_within_the_supervisors_own_three_seconds() -> None:
    found = [result for result in results([FOLDER]) if result["fault"]]
    assert [result["fault"] for result in found] == list(FAULTS)
    assert all(result["as_it_must"] for result in found)
    for part in ("exit_to_spawn", "healthy_to_ready"):
        share = middle(value for result in found for value in result["own_share"][part])
        assert share is not None
        assert share <= 3


@pytest.mark.parametrize(("fault", "launch"), [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (5, 2)])
def test_the_simulated_card_foretells_launches_that_it_was_not_fitted_to(fault: int, launch: int) -> None:
    facts = record(fault)["facts"]
    argv = next(fact["argv"] for name, fact in facts if name == "Spawned" and fact["launch"] == launch)
    printed = next(one.numbers for one in times(facts) if one.number == launch)
    assert printed is not None
    card = read_card("h200")
    model = card.models["Qwen/Qwen2.5-7B-Instruct"]
    settings = resolve(card, model, parse(["serve", *argv[argv.index("serve") + 1 :]]), Console("test"))
    # The first start of a configuration compiles; here it took 18 s and more.
    ledger = account(card.device, model, settings, cold=printed["compile_s"] > 10)
    assert ledger.kv / GIB == pytest.approx(printed["available_kv_gib"], abs=0.02)
    assert ledger.activation / GIB == pytest.approx(printed["activation_gib"], abs=0.01)
    assert ledger.requested / GIB == pytest.approx(printed["requested_gib"], abs=0.01)
    assert ledger.tokens(settings.max_model_len) == pytest.approx(printed["kv_tokens"], rel=0.001)


def test_the_simulated_engine_takes_as_long_to_exit_after_a_failed_start() -> None:
    seen = [
        (one.exited - one.fatal) / SECOND
        for fault in FAULTS
        for one in times(record(fault)["facts"])
        if one.fatal is not None and one.exited is not None and one.healthy is None
    ]
    assert len(seen) == 3
    assert min(seen) <= read_card("h200").timing.failed_start <= max(seen)


def test_nvml_agrees_with_cuda_to_the_byte() -> None:
    (truth,) = (result["found"] for result in results([FOLDER]) if result["fault"] == 0)
    for moment in ("context", "held"):
        sampled, torch = truth[moment]["sampler"], truth[moment]["torch"]
        assert (sampled["total_bytes"], sampled["free_bytes"]) == (torch["total_bytes"], torch["free_bytes"])
    busy = truth["worked on, beside a neighbour"]
    per_process = {str(holder["pid"]): holder["bytes"] >> 20 for holder in busy["sampler"]["holders"]}
    assert per_process == busy["nvidia_smi"]["processes"]
