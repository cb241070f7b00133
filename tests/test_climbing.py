"""The way back up, planned changes, pressure and an operator's verbs, lived through in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisord_vllm.core.actions import Spawn
from supervisord_vllm.core.diagnosis import Action, Diagnosis, Kind
from supervisord_vllm.core.facts import Commanded, Fact, LoadSeen, Pressed, ReliefJudged, RoomSeen
from supervisord_vllm.core.ledger import GIB
from supervisord_vllm.core.levers import Levers, Rung, Weights
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import StateName
from world import Outcome, World

DECLARED = Levers({"gpu_memory_utilization": 700, "max_model_len": 65536, "max_num_seqs": 16, "weights": Weights("m")})
LADDER = (
    Rung("gpu_memory_utilization", step=50, min=500, max=700),
    Rung("max_num_seqs", factor=0.5, min=4, max=64),
    Rung("max_model_len", min=4096),
    Rung("enforce_eager"),
)
POLICY = Policy("p", DECLARED, LADDER, step_up_ns=1800 * SECOND)
NUMBERS: dict[str, int | float | str] = {
    "version": "0.26.0", "available_kv_gib": 20.0, "kv_tokens": 100_000, "max_num_seqs": 16,
}  # fmt: skip


def too_long(spawn: Spawn) -> Outcome | None:
    if spawn.levers.number("max_model_len") == 65536:
        numbers = {"max_model_len": 65536, "estimated_max_len": 30000, "needed_kv_gib": 20.0, "available_kv_gib": 9.0}
        return Outcome(
            None, fails_s=30, code=1, diagnosis=Diagnosis(Kind.KV_LEN_TOO_LONG, numbers=numbers, signature="l")
        )
    return None


def told(world: World, fact: Fact) -> World:
    """Tell the present launch a fact, and let its consequences happen."""
    assert world.state.launch is not None
    world.send(0, replace(fact, launch=world.state.launch.number))
    return world.run(5)


def degraded(policy: Policy = POLICY, *, cures_after: int = 99) -> World:
    """A world whose length was halved; from launch ``cures_after`` on the declared length works."""
    world = World(policy, lambda spawn, w: (too_long(spawn) if spawn.launch < cures_after else None) or Outcome())
    world.run(until=lambda w: w.state.name is StateName.SERVING)
    assert world.spawns[-1].levers["max_model_len"] == 30000
    return told(world, LoadSeen(at_ns=0))


def test_a_shorter_length_is_taken_back_after_a_time_of_service_at_a_quiet_moment() -> None:
    shorter = DECLARED.with_(max_model_len=30000)
    world = World(POLICY, lambda spawn, world: Outcome(), last_known_good=shorter)
    world.run(until=lambda w: w.state.name is StateName.SERVING)
    told(world, LoadSeen(at_ns=0))
    world.run(1700)
    assert len(world.spawns) == 1, "not before its time"
    told(world, LoadSeen(at_ns=0, running=2))
    world.run(3600)
    assert len(world.spawns) == 1, "not while requests run"
    told(world, LoadSeen(at_ns=0))
    world.run(300)
    assert [spawn.levers for spawn in world.spawns] == [shorter, DECLARED]
    decision = world.decisions[-1]
    assert decision.action is Action.NEXT_CONFIG
    assert decision.then == "draining"
    assert "a step up, max_model_len 30,000 → 65,536" in decision.sentence
    assert world.state.name is StateName.SERVING


def test_a_known_failure_is_not_probed_again_and_half_of_the_way_is_tried() -> None:
    world = degraded()
    world.run(2000)
    assert world.spawns[-1].levers["max_model_len"] == 47760
    assert world.state.name is StateName.SERVING


def test_a_failed_step_up_goes_back_to_last_known_good_and_doubles_the_wait() -> None:
    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.levers.number("max_model_len") != 30000:
            return too_long(spawn) or Outcome(
                None, fails_s=30, code=1, diagnosis=Diagnosis(Kind.KV_LEN_TOO_LONG, signature="h")
            )
        return Outcome()

    world = World(POLICY, script)
    world.run(until=lambda w: w.state.name is StateName.SERVING)
    told(world, LoadSeen(at_ns=0))
    world.run(2000)
    assert [spawn.levers["max_model_len"] for spawn in world.spawns] == [65536, 30000, 47760, 30000]
    assert world.decisions[-1].moves[0].how == "restored"
    assert world.state.failed_climbs == 1
    assert world.state.name is StateName.SERVING


def test_hold_and_planned_per_day_and_act_keep_it_down() -> None:
    held = degraded()
    held.command("hold")
    held.run(8000)
    assert len(held.spawns) == 2
    none = degraded(replace(POLICY, planned_per_day=0))
    none.run(8000)
    assert len(none.spawns) == 2


def test_act_false_says_the_step_up_once_and_does_not_take_it() -> None:
    shorter = DECLARED.with_(max_model_len=30000)
    world = World(replace(POLICY, act=False), lambda spawn, world: Outcome())
    world.run(until=lambda w: w.state.name is StateName.SERVING)
    launch = world.state.launch
    assert launch is not None
    world.state = replace(world.state, launch=replace(launch, levers=shorter, target=shorter))
    told(world, LoadSeen(at_ns=0))
    world.run(20_000)
    assert len(world.spawns) == 1
    (decision,) = world.decisions
    assert not decision.acted
    assert "It would be time for" in decision.sentence


def test_the_utilization_jumps_back_once_a_neighbour_has_left() -> None:
    world = World(POLICY, lambda spawn, world: Outcome(numbers=NUMBERS))
    world.foreign = 50 * GIB
    world.run(200)
    assert world.spawns[0].levers["gpu_memory_utilization"] == 637
    told(world, LoadSeen(at_ns=0))
    world.send(4000, LoadSeen(at_ns=0, launch=1))
    world.run(4000)
    assert len(world.spawns) == 1, "it still holds its memory"
    world.foreign = 0
    told(world, RoomSeen(at_ns=0, devices=world.devices()))
    world.run(600)
    assert world.spawns[-1].levers["gpu_memory_utilization"] == 700
    assert "utilization 0.637 → 0.700" in world.decisions[-1].sentence


def test_a_drain_ends_when_requests_are_done_or_at_its_deadline() -> None:
    for busy_s, stopped_s in ((20, 20), (2000, 300)):
        world = World(replace(POLICY, drain_ns=300 * SECOND), lambda spawn, world: Outcome()).run(200)
        told(world, LoadSeen(at_ns=0, running=1))
        world.command("drain")
        world.send(busy_s, LoadSeen(at_ns=0, launch=1))
        began = world.now
        world.run(until=lambda w: w.state.name is StateName.DRAINING)
        assert not world.state.ready
        world.run(until=lambda w: w.state.name is StateName.STOPPED)
        assert (world.now - began) / SECOND == pytest.approx(stopped_s, abs=5)


def test_a_hold_takes_a_planned_change_back_while_requests_finish() -> None:
    world = degraded(cures_after=3)
    told(world, LoadSeen(at_ns=0, running=1))
    world.command("step")
    world.state = replace(world.state, draining=None)
    world.send(0, Commanded(at_ns=0, verb="step", lever="max_num_seqs", direction="up"))
    world.run(until=lambda w: w.state.name is StateName.DRAINING)
    world.command("hold")
    world.run(60)
    assert world.state.name is StateName.SERVING
    assert world.state.held


def test_an_engine_that_dies_while_it_drains_keeps_the_plan() -> None:
    world = World(POLICY, lambda spawn, world: Outcome(fails_s=400 if spawn.launch == 1 else None)).run(200)
    told(world, LoadSeen(at_ns=0, running=1))
    world.send(0, Commanded(at_ns=0, verb="step", lever="max_num_seqs", direction="up"))
    world.run(3000)
    assert [spawn.levers["max_num_seqs"] for spawn in world.spawns] == [16, 32]
    assert len(world.decisions) == 1


def test_an_operator_steps_a_lever_within_its_bounds_and_never_another() -> None:
    world = World(POLICY, lambda spawn, world: Outcome()).run(200)
    told(world, LoadSeen(at_ns=0))
    for direction, lever in (("up", "max_num_seqs"), ("up", "max_num_seqs"), ("up", "max_num_seqs"), ("up", "weights")):
        world.send(0, Commanded(at_ns=0, verb="step", by="ada", lever=lever, direction=direction))  # type: ignore[arg-type]
        world.run(200)
        told(world, LoadSeen(at_ns=0))
    assert [spawn.levers["max_num_seqs"] for spawn in world.spawns] == [16, 32, 64]
    assert "at the word of ada" in world.decisions[0].sentence


def test_a_restart_is_the_same_configuration_and_a_reset_begins_afresh() -> None:
    world = degraded(cures_after=4)
    world.command("restart")
    world.run(200)
    assert [spawn.levers["max_model_len"] for spawn in world.spawns] == [65536, 30000, 30000]
    world.command("reset")
    world.run(5)
    assert all(seen.outcome == "proven" for seen in world.state.observations)
    assert world.state.name is StateName.SERVING


def test_a_reset_after_giving_up_starts_what_is_declared() -> None:
    world = World(
        replace(POLICY, on_give_up="stay"),
        lambda spawn, world: Outcome(None, fails_s=9, diagnosis=Diagnosis(Kind.HUB_DENIED)),
    ).run(100)
    assert world.state.name is StateName.GIVEN_UP
    world.command("reset")
    world.run(until=lambda w: len(w.spawns) == 2)
    assert world.spawns[-1].levers == DECLARED


def served(policy: Policy = POLICY) -> World:
    return told(World(policy, lambda spawn, world: Outcome(numbers=NUMBERS)).run(200), LoadSeen(at_ns=0))


def pressed(verdict: str, sequences: int | None = 40) -> Pressed:
    return Pressed(at_ns=0, verdict=verdict, loss=0.8, lost_s=90, cost_s=80, sequences=sequences)  # type: ignore[arg-type]


def test_slot_bound_gets_as_many_sequences_as_the_cache_holds() -> None:
    world = told(served(), pressed("slot")).run(200)
    assert world.spawns[-1].levers["max_num_seqs"] == 40
    assert world.decisions[0].kind is Kind.OVERLOAD
    assert "bound by its number of sequences" in world.decisions[0].sentence


def test_kv_bound_gets_utilization_and_fewer_sequences_only_where_that_cannot_cover_it() -> None:
    policy = replace(POLICY, ladder=(Rung("gpu_memory_utilization", step=50, min=500, max=720), *LADDER[1:]))
    world = told(served(policy), pressed("kv", 8)).run(200)
    levers = world.spawns[-1].levers
    assert levers["gpu_memory_utilization"] == 720
    assert levers["max_num_seqs"] == 9
    wide = replace(POLICY, ladder=(Rung("gpu_memory_utilization", step=50, min=500, max=950), *LADDER[1:]))
    world = told(served(wide), pressed("kv", 15)).run(200)
    assert world.spawns[-1].levers["max_num_seqs"] == 16
    assert world.spawns[-1].levers["gpu_memory_utilization"] == 710


def test_compute_bound_is_said_once_and_changes_nothing() -> None:
    world = told(told(served(), pressed("compute")), pressed("compute")).run(300)
    assert len(world.spawns) == 1
    (decision,) = world.decisions
    assert decision.action is Action.OBSERVE
    assert "More engines" in decision.sentence


def test_a_change_against_pressure_that_brought_nothing_is_taken_back_and_costs_double() -> None:
    world = told(served(), pressed("slot")).run(200)
    told(told(world, LoadSeen(at_ns=0)), ReliefJudged(at_ns=0, keep=False, text="80% late, 78% before"))
    world.run(200)
    assert [spawn.levers["max_num_seqs"] for spawn in world.spawns] == [16, 40, 16]
    assert world.state.roll_backs == {"slot": 1}
    assert "80% late" in world.decisions[-1].sentence


def test_planned_restarts_against_pressure_are_bounded_per_day() -> None:
    world = served(replace(POLICY, planned_per_day=1))
    for _ in range(3):
        told(told(world, LoadSeen(at_ns=0)), pressed("slot", 20 + 10 * len(world.spawns))).run(300)
    assert len(world.spawns) == 2
    assert "planned-per-day" in world.decisions[-1].sentence


def test_a_step_up_is_forgotten_by_what_the_cache_refutes() -> None:
    world = World(POLICY, lambda spawn, w: too_long(spawn) or Outcome(numbers={**NUMBERS, "kv_tokens": 31_000}))
    world.run(until=lambda w: w.state.name is StateName.SERVING)
    told(world, LoadSeen(at_ns=0))
    world.run(20_000)
    assert len(world.spawns) == 2, "47,760 tokens cannot fit into a cache of 31,000"
