"""Whole incidents through `decide` in virtual time: what an operator would live through, fact by fact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisord_vllm.core.actions import Spawn
from supervisord_vllm.core.diagnosis import Action, Diagnosis, Evidence, Kind
from supervisord_vllm.core.facts import FatalSeen, HealthSeen, ProcessRef
from supervisord_vllm.core.ledger import GIB
from supervisord_vllm.core.levers import Levers, Rung, Weights
from supervisord_vllm.core.policy import SECOND, Backoff, Gate, Override, Policy
from world import TOTAL, Outcome, World

AWQ = Weights("m-awq", "awq_marlin")
DECLARED = Levers({"gpu_memory_utilization": 900, "max_model_len": 8192, "max_num_seqs": 16, "weights": Weights("m")})
LADDER = (
    Rung("gpu_memory_utilization", step=50, min=700, max=950),
    Rung("max_num_seqs", factor=0.5, min=4),
    Rung("max_model_len", min=4096),
    Rung("enforce_eager"),
    Rung("weights", use=(AWQ,)),
)
POLICY = Policy("qwen", DECLARED, LADDER, gate=Gate(2 * SECOND, 60 * SECOND, 600 * SECOND))


def oom(kind: Kind, tried: float = 0.1, free: float = 0.04) -> Diagnosis:
    text = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried} GiB."
    numbers = {"tried_gib": tried, "free_gib": free, "total_gib": 139.8}
    return Diagnosis(kind, "runtime", numbers=numbers, evidence=(Evidence(9, "EngineCore", text),), signature="oom")


def fine(spawn: Spawn, world: World) -> Outcome:
    return Outcome()


def refused(world: World, utilization: int) -> Outcome:
    free = (TOTAL - world.foreign) / GIB - 0.51
    numbers = {"free_gib": free, "total_gib": 139.8, "util": utilization / 1000, "requested_gib": utilization * 0.1398}
    return Outcome(
        healthy_s=None,
        fails_s=20,
        code=1,
        diagnosis=Diagnosis(Kind.GPU_BUSY_FOREIGN, numbers=numbers, signature="busy"),
    )


def test_a_neighbour_at_the_gate_lowers_the_first_launch_to_what_fits_and_teaches_nothing() -> None:
    world = World(POLICY, fine)
    world.foreign = 40 * GIB
    world.run()
    assert [spawn.levers["gpu_memory_utilization"] for spawn in world.spawns] == [708]
    assert world.state.name.value == "serving"
    assert world.proven == [DECLARED], "what was asked for is last known good, not what a neighbour forced"
    (decision,) = world.decisions
    assert decision.kind is Kind.GPU_BUSY_FOREIGN
    assert "utilization 0.900 → 0.708" in decision.sentence
    assert "pid 2712 (python) holds 40.00 GiB" in decision.sentence
    assert world.elapsed() > 60, "it was waited for before"


def test_a_neighbour_that_leaves_in_time_costs_nothing_but_the_wait() -> None:
    world = World(POLICY, fine)
    world.foreign = 40 * GIB

    def leave(world: World) -> None:
        if world.elapsed() > 30:
            world.foreign = 0

    world.on_sample = leave
    world.run()
    assert [spawn.levers for spawn in world.spawns] == [DECLARED]
    assert world.decisions == []


def test_a_neighbour_after_the_gate_is_waited_for_and_then_fitted_beside() -> None:
    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.launch == 1:
            world.foreign = 36 * GIB
            return refused(world, 900)
        return Outcome()

    world = World(POLICY, script).run()
    assert [spawn.levers["gpu_memory_utilization"] for spawn in world.spawns] == [900, 737]
    first, second = world.decisions
    assert first.action is Action.WAIT_VRAM
    assert "Waiting up to 60 s for memory, then utilization 0.900 → 0.737" in first.sentence
    assert second.moves[0].how == "computed"
    assert world.state.name.value == "serving"


def test_nothing_fits_beside_a_neighbour_so_it_waits_until_the_deadline_and_says_who() -> None:
    world = World(POLICY, fine)
    world.foreign = 100 * GIB
    world.run()
    assert world.spawns == []
    assert world.exit == 69
    assert world.given_up is not None
    assert "pid 2712" in world.given_up.text
    assert "10 min" in world.given_up.text


def test_a_shortfall_of_less_than_a_hundredth_of_the_card_is_not_waited_for() -> None:
    world = World(POLICY, fine)
    world.foreign = round(TOTAL - 0.9 * TOTAL - 0.6 * GIB)  # the margin is short
    world.run()
    assert [spawn.levers["gpu_memory_utilization"] for spawn in world.spawns] == [898]
    assert world.states[1][0] < 5


def too_long(length: int, estimate: int, needed: float, there: float) -> Diagnosis:
    numbers = {
        "max_model_len": length,
        "estimated_max_len": estimate,
        "needed_kv_gib": needed,
        "available_kv_gib": there,
    }
    return Diagnosis(Kind.KV_LEN_TOO_LONG, numbers=numbers, signature="len")


def test_a_length_above_the_pool_raises_utilization_exactly_where_that_is_permitted_and_free() -> None:
    policy = replace(POLICY, declared=DECLARED.with_(gpu_memory_utilization=900, max_model_len=131072))

    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.levers["gpu_memory_utilization"] == 900:
            return Outcome(None, fails_s=30, code=1, diagnosis=too_long(131072, 60000, 7.0, 3.2))
        return Outcome()

    world = World(policy, script).run()
    assert [spawn.levers["gpu_memory_utilization"] for spawn in world.spawns] == [900, 928]
    assert world.spawns[1].levers["max_model_len"] == 131072


def test_a_length_above_the_pool_becomes_the_estimate_where_only_the_length_may_move() -> None:
    policy = replace(POLICY, declared=DECLARED.with_(max_model_len=131072), ladder=(Rung("max_model_len", min=4096),))

    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.levers["max_model_len"] == 131072:
            return Outcome(None, fails_s=30, code=1, diagnosis=too_long(131072, 60007, 7.0, 3.2))
        return Outcome()

    world = World(policy, script).run()
    assert [spawn.levers["max_model_len"] for spawn in world.spawns] == [131072, 60000]
    assert "gpu_memory_utilization: not declared movable" in world.decisions[0].skipped
    assert len(world.spawns) == 2


def test_no_cache_blocks_raises_utilization_by_the_printed_deficit() -> None:
    policy = replace(
        POLICY,
        declared=DECLARED.with_(gpu_memory_utilization=100),
        ladder=(Rung("gpu_memory_utilization", step=50, min=50, max=950),),
    )
    blocks = Diagnosis(Kind.KV_NO_BLOCKS, numbers={"available_kv_gib": -1.63, "total_gib": 139.8}, signature="blocks")

    def script(spawn: Spawn, world: World) -> Outcome:
        return Outcome(None, fails_s=30, code=1, diagnosis=blocks) if spawn.launch == 1 else Outcome()

    world = World(policy, script).run()
    assert [spawn.levers["gpu_memory_utilization"] for spawn in world.spawns] == [100, 162]
    assert world.decisions[0].moves[0].direction == "up"


def test_running_out_of_memory_while_serving_steps_down_to_the_floor_then_moves_other_levers_then_stops() -> None:
    def script(spawn: Spawn, world: World) -> Outcome:
        return Outcome(fails_s=200, diagnosis=oom(Kind.OOM_RUNTIME))

    world = World(POLICY, script).run(100_000)
    values = [(spawn.levers["gpu_memory_utilization"], spawn.levers["max_num_seqs"]) for spawn in world.spawns]
    assert values[:5] == [(900, 16), (850, 16), (800, 16), (750, 16), (700, 16)]
    assert values[5:7] == [(700, 8), (700, 4)]
    assert world.spawns[7].levers.eager
    assert world.spawns[8].levers["weights"] == AWQ
    assert len(world.spawns) == 9
    assert world.exit == 69
    assert world.given_up is not None
    assert "already at its floor 0.700" in world.given_up.text
    assert all(spawn.levers["max_model_len"] == 8192 for spawn in world.spawns), "the length frees nothing"


def test_a_neighbour_that_grew_while_serving_is_blamed_and_the_configuration_is_not() -> None:
    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.launch == 1:
            world.foreign = 0
            return Outcome(fails_s=300, diagnosis=oom(Kind.OOM_RUNTIME))
        return Outcome()

    policy = replace(POLICY, declared=DECLARED.with_(gpu_memory_utilization=750))
    world = World(policy, script)
    world.run(200)
    world.foreign = 38 * GIB
    world.run()
    assert [spawn.levers["gpu_memory_utilization"] for spawn in world.spawns] == [750, 722]
    decision = world.decisions[0]
    assert decision.kind is Kind.OOM_RUNTIME
    assert decision.action is Action.WAIT_VRAM
    assert "pid 2712 (python) took 38.00 GiB since the start" in decision.sentence
    assert world.state.target == policy.declared
    assert not any(seen.outcome != "proven" for seen in world.state.observations)


def test_a_bad_flag_is_one_launch_with_the_sentence_of_vllm() -> None:
    line = Evidence(3, "APIServer", "vllm: error: unrecognized arguments: --frobnicate")
    bad = Diagnosis(Kind.BAD_CONFIG, evidence=(line,), signature="argparse", advice="Remove the flag.")
    world = World(POLICY, lambda spawn, world: Outcome(None, fails_s=15, code=2, diagnosis=bad)).run()
    assert len(world.spawns) == 1
    assert world.exit == 69
    assert world.given_up is not None
    assert "unrecognized arguments: --frobnicate" in world.given_up.text
    assert world.given_up.exhausted_until_ns is None


def test_an_unknown_failure_is_tried_again_once_and_never_steps() -> None:
    strange = Diagnosis(Kind.UNKNOWN, evidence=(Evidence(3, "EngineCore", "RuntimeError: what?"),), signature="what")
    world = World(POLICY, lambda spawn, world: Outcome(None, fails_s=15, code=1, diagnosis=strange)).run()
    assert [spawn.levers for spawn in world.spawns] == [DECLARED, DECLARED]
    assert world.exit == 69
    assert world.given_up is not None
    assert "RuntimeError: what?" in world.given_up.text


def test_a_dead_engine_comes_back_as_it_was_until_the_budget_of_the_window_is_used() -> None:
    dead = Diagnosis(Kind.ENGINE_DEAD, "runtime", signature="dead")
    world = World(POLICY, lambda spawn, world: Outcome(fails_s=120, diagnosis=dead)).run(20_000)
    assert len(world.spawns) == POLICY.budget + 1
    assert {spawn.levers for spawn in world.spawns} == {DECLARED}
    assert world.exit == 69
    assert world.given_up is not None
    assert world.given_up.exhausted_until_ns is not None
    assert "All 6 same-again restarts within 1 h are used" in world.given_up.text


def test_restarts_outside_the_window_do_not_count() -> None:
    dead = Diagnosis(Kind.ENGINE_DEAD, "runtime", signature="dead")
    world = World(POLICY, lambda spawn, world: Outcome(fails_s=1000, diagnosis=dead)).run(20_000)
    assert world.exit is None
    assert len(world.spawns) > POLICY.budget + 1


def test_the_same_signature_three_times_without_a_proof_stops() -> None:
    dead = Diagnosis(Kind.CUDA_FAULT, "startup", signature="fault")
    world = World(POLICY, lambda spawn, world: Outcome(None, fails_s=20, diagnosis=dead)).run(20_000)
    assert len(world.spawns) == 3
    assert world.exit == 69


def test_an_incident_has_at_most_max_launches() -> None:
    def script(spawn: Spawn, world: World) -> Outcome:
        world.foreign = 30 * GIB
        outcome = refused(world, 900)
        world.foreign = 0
        return outcome

    world = World(POLICY, script).run(100_000)
    assert len(world.spawns) == POLICY.max_launches
    assert world.given_up is not None
    assert "max-launches" in world.given_up.text


def test_hold_turns_a_change_of_configuration_into_the_same_again() -> None:
    world = World(POLICY, lambda spawn, world: Outcome(fails_s=100, diagnosis=oom(Kind.OOM_RUNTIME)))
    world.command("hold", 50)
    world.run(until=lambda world: len(world.spawns) == 2)
    assert [spawn.levers for spawn in world.spawns] == [DECLARED, DECLARED]
    assert world.decisions[0].moves == ()
    assert any("utilization 0.900 → 0.850 would be next" in text for text in world.decisions[0].skipped)


def test_act_false_says_what_it_would_do_and_does_nothing_of_it() -> None:
    policy = replace(POLICY, act=False)
    world = World(policy, lambda spawn, world: Outcome(fails_s=100, diagnosis=oom(Kind.OOM_RUNTIME))).run()
    assert [spawn.levers for spawn in world.spawns] == [DECLARED]
    (decision,) = world.decisions
    assert not decision.acted
    assert decision.moves[0].after == 850
    assert world.exit == 69
    assert world.given_up is not None
    assert "act = false" in world.given_up.text


def test_act_false_launches_what_is_declared_beside_a_neighbour() -> None:
    world = World(replace(POLICY, act=False), fine)
    world.foreign = 40 * GIB
    world.run(200)
    assert [spawn.levers for spawn in world.spawns] == [DECLARED]
    assert not world.decisions[0].acted


def test_a_taken_port_waits_at_the_gate_and_ends_with_its_owner_named() -> None:
    world = World(POLICY, fine)
    world.port_owner = ProcessRef(77, "bob", "nginx")
    world.run()
    assert world.spawns == []
    assert world.exit == 69
    assert world.decisions[0].kind is Kind.PORT_IN_USE
    assert "pid 77 (nginx)" in world.decisions[0].sentence


def test_memory_that_cannot_be_read_does_not_keep_the_gate_shut() -> None:
    world = World(POLICY, fine)
    world.memory_error = "NVML: not supported"
    world.run()
    assert len(world.spawns) == 1
    assert world.state.name.value == "serving"


def test_a_step_that_vllm_refuses_is_passed_over_and_the_failure_before_it_is_judged_again() -> None:
    policy = replace(POLICY, ladder=(Rung("max_num_seqs", factor=0.5, min=4), Rung("enforce_eager")))
    line = Evidence(3, "APIServer", "Value error, max_num_seqs has to be a multiple of 16")

    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.levers.eager:
            return Outcome()
        if spawn.levers["max_num_seqs"] == 16:
            return Outcome(None, fails_s=30, code=1, diagnosis=oom(Kind.OOM_CUDAGRAPH))
        return Outcome(None, fails_s=5, code=1, diagnosis=Diagnosis(Kind.BAD_CONFIG, evidence=(line,), signature="v"))

    world = World(policy, script).run()
    assert [spawn.levers["max_num_seqs"] for spawn in world.spawns] == [16, 8, 16]
    assert world.spawns[2].levers.eager
    assert "passed over" in world.decisions[1].sentence
    assert world.state.name.value == "serving"


def test_an_override_replaces_the_remedies_of_one_kind() -> None:
    policy = replace(POLICY, overrides={Kind.OOM_RUNTIME: Override(("max_num_seqs", "stop"))})
    world = World(policy, lambda spawn, world: Outcome(fails_s=100, diagnosis=oom(Kind.OOM_RUNTIME))).run(10_000)
    assert [spawn.levers["max_num_seqs"] for spawn in world.spawns] == [16, 8, 4]
    assert {spawn.levers["gpu_memory_utilization"] for spawn in world.spawns} == {900}


def test_order_ladder_tries_the_levers_as_the_ladder_lists_them() -> None:
    ladder = (LADDER[1], LADDER[0])
    policy = replace(POLICY, ladder=ladder, overrides={Kind.OOM_RUNTIME: Override(order="ladder")})
    world = World(policy, lambda spawn, world: Outcome(fails_s=100, diagnosis=oom(Kind.OOM_RUNTIME))).run(250)
    assert world.decisions[0].moves[0].lever == "max_num_seqs"


def test_a_canary_that_fails_ends_an_engine_that_calls_itself_healthy() -> None:
    world = World(POLICY, lambda spawn, world: Outcome(canary=spawn.launch > 1)).run()
    assert len(world.spawns) == 2
    assert world.decisions[0].kind is Kind.ENGINE_HUNG
    assert "no byte in 30 s" in world.decisions[0].sentence
    assert world.state.name.value == "serving"


def test_an_engine_that_says_it_dies_is_not_ready_at_once_and_a_request_decides_whether_it_does() -> None:
    """Text alone proves nothing: a prompt can quote anything."""
    world = World(POLICY, fine).run(120)
    assert world.state.ready
    world.send(0, FatalSeen(at_ns=0, launch=1, text="EngineCore encountered a fatal error."))
    world.run(1)
    soon = world.state
    assert not soon.ready
    world.run(100)
    assert world.state.ready
    assert len(world.spawns) == 1, "it answered: nothing was wrong but the words"
    world.outcome.canary = False
    world.send(0, FatalSeen(at_ns=0, launch=1, text="EngineCore encountered a fatal error."))
    later: World = world.run(100)
    assert [state for _, state in later.states].count("serving") == 2
    assert later.decisions[0].kind is Kind.ENGINE_DEAD
    assert "said that it is dying and answers no request" in later.decisions[0].sentence


def test_a_soak_that_ends_while_health_is_down_waits_and_never_spins() -> None:
    world = World(POLICY, fine)
    world.run(until=lambda world: world.state.name.value == "proving")
    world.send(29, HealthSeen(at_ns=0, launch=1, status=503))
    world.send(35, HealthSeen(at_ns=0, launch=1, status=200))
    world.run(120)
    assert world.state.name.value == "serving"
    assert world.decisions == []


def test_a_refused_api_key_is_a_mistake_in_the_policy_and_costs_one_launch() -> None:
    world = World(POLICY, lambda spawn, world: Outcome(canary=False, canary_status=401)).run()
    assert len(world.spawns) == 1
    assert world.exit == 69
    assert "api-key-file" in world.decisions[0].sentence


def test_memory_that_cannot_be_read_while_it_is_short_keeps_the_gate_shut() -> None:
    world = World(POLICY, fine)
    world.foreign = 100 * GIB

    def blind(world: World) -> None:
        world.memory_error = "NVML has not answered" if world.elapsed() > 5 else None

    world.on_sample = blind
    world.run()
    assert world.spawns == []
    assert world.exit == 69


def test_an_undeclared_utilization_waits_for_what_vllm_printed_and_does_not_hammer_the_card() -> None:
    policy = replace(POLICY, declared=Levers({"weights": Weights("m")}), ladder=())

    def script(spawn: Spawn, world: World) -> Outcome:
        world.foreign = 60 * GIB
        return refused(world, 920)

    world = World(policy, script).run(3000)
    assert len(world.spawns) == 1, "it waits at the gate instead"
    assert world.exit == 69


def test_a_refusal_without_readable_memory_backs_off_within_the_budget() -> None:
    def script(spawn: Spawn, world: World) -> Outcome:
        return refused(world, 900)

    world = World(POLICY, script)
    world.memory_error = "NVML: not supported"
    world.run(20_000)
    assert "backing-off" in [state for _, state in world.states]
    assert len(world.spawns) <= POLICY.budget + 1
    assert world.exit == 69


def test_a_raise_from_where_a_neighbour_pushed_it_does_not_lower_what_is_asked_for() -> None:
    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.launch == 1:
            world.foreign = 20 * GIB
            return Outcome(None, fails_s=30, code=1, diagnosis=too_long(8192, 4000, 4.0, 3.0))
        world.foreign = 0
        return Outcome()

    world = World(POLICY, script)
    world.foreign = 40 * GIB
    world.run()
    assert world.spawns[0].levers["gpu_memory_utilization"] == 708
    assert world.state.target["gpu_memory_utilization"] == 900


def test_a_machine_that_is_out_of_something_is_tried_again_and_a_missing_command_is_not() -> None:
    for lasting, launches in ((True, 1), (False, POLICY.budget + 1)):
        world = World(POLICY, lambda spawn, world, lasting=lasting: Outcome(unexecuted="no", lasting=lasting))  # type: ignore[misc]
        world.run(20_000)
        assert len(world.spawns) == launches
        assert world.exit == 69
        assert world.decisions[-1].kind is (Kind.BAD_CONFIG if lasting else Kind.OS_LIMIT)


def test_a_last_known_good_outside_the_bounds_of_today_is_not_restored() -> None:
    good = DECLARED.with_(gpu_memory_utilization=650)
    world = World(POLICY, fine, last_known_good=good).run()
    assert [spawn.levers for spawn in world.spawns] == [DECLARED]


def test_a_stop_while_leftovers_are_ended_means_that_no_launch_follows() -> None:
    world = World(POLICY, fine)
    world.command("stop", 0.05)
    world.run()
    assert world.spawns == []
    assert world.state.name.value == "stopped"


def test_a_start_after_giving_up_asks_for_what_was_good_or_declared_not_for_the_end_of_the_ladder() -> None:
    world = World(
        replace(POLICY, on_give_up="stay"), lambda spawn, world: Outcome(fails_s=200, diagnosis=oom(Kind.OOM_RUNTIME))
    )
    world.run(100_000)
    assert world.state.name.value == "given-up"
    launches = len(world.spawns)
    world.command("start")
    world.run(until=lambda world: len(world.spawns) > launches)
    first = world.spawns[launches].levers
    assert first in (DECLARED, world.state.good)


def test_a_health_that_comes_back_within_ten_seconds_is_no_failure() -> None:
    world = World(POLICY, fine).run(120)
    world.send(0, HealthSeen(at_ns=0, launch=1, status=503))
    world.send(8, HealthSeen(at_ns=0, launch=1, status=200))
    world.run(100)
    assert world.decisions == []
    world.send(0, HealthSeen(at_ns=0, launch=1, status=None))
    world.run(100)
    assert len(world.spawns) == 2


def test_a_start_that_never_becomes_healthy_is_ended_at_its_ceiling() -> None:
    policy = replace(POLICY, start_max_ns=300 * SECOND)
    world = World(policy, lambda spawn, world: Outcome(healthy_s=None if spawn.launch == 1 else 40)).run()
    assert world.decisions[0].kind is Kind.STARTUP_WEDGED
    assert "5 min" in world.decisions[0].sentence
    assert world.state.name.value == "serving"


@pytest.mark.parametrize("at_s", [0.05, 1, 2.5, 30, 41, 60, 200])
def test_stop_and_shutdown_end_everything_from_any_state(at_s: float) -> None:
    for verb in ("stop", "shutdown"):
        world = World(POLICY, fine)
        world.command(verb, at_s)
        world.run(400)
        assert world.living is None or verb == "stop"
        if verb == "shutdown":
            assert world.exit == 0
            assert world.living is None
        else:
            assert world.exit is None


def test_an_operator_can_stop_and_start_again() -> None:
    world = World(POLICY, fine)
    world.command("stop", 100)
    world.command("start", 200)
    world.run(400)
    assert [name for _, name in world.states].count("serving") == 2
    assert len(world.spawns) == 2
    assert world.decisions == []


def test_a_stop_during_a_failure_drops_the_plan() -> None:
    dead = Diagnosis(Kind.ENGINE_DEAD, "runtime", signature="dead")
    world = World(POLICY, lambda spawn, world: Outcome(fails_s=100, diagnosis=dead))
    world.run(until=lambda world: world.state.name.value == "stopping")
    world.command("stop")
    world.run()
    assert world.state.name.value == "stopped"
    assert len(world.spawns) == 1


def test_given_up_can_stay_and_be_started_again() -> None:
    bad = Diagnosis(Kind.BAD_CONFIG, signature="argparse")
    world = World(
        replace(POLICY, on_give_up="stay"), lambda spawn, world: Outcome(None, fails_s=15, code=2, diagnosis=bad)
    ).run()
    assert world.state.name.value == "given-up"
    assert world.exit is None
    world.command("start")
    world.run(until=lambda world: len(world.spawns) == 2)
    assert len(world.spawns) == 2


def test_a_restarted_daemon_starts_at_last_known_good_and_says_so() -> None:
    good = DECLARED.with_(gpu_memory_utilization=850)
    world = World(POLICY, fine, last_known_good=good).run()
    assert [spawn.levers for spawn in world.spawns] == [good]
    (decision,) = world.decisions
    assert decision.moves[0].how == "restored"
    assert "utilization 0.900 → 0.850" in decision.sentence


def test_a_last_known_good_never_moves_what_the_policy_does_not_let_move() -> None:
    good = DECLARED.with_(gpu_memory_utilization=850)
    world = World(replace(POLICY, ladder=()), fine, last_known_good=good).run()
    assert [spawn.levers for spawn in world.spawns] == [DECLARED]


def test_the_bracket_keeps_the_utilization_from_going_back_where_it_failed() -> None:
    policy = replace(POLICY, ladder=(Rung("gpu_memory_utilization", step=10, min=700, max=950),))
    low = Diagnosis(Kind.KV_NO_BLOCKS, numbers={"available_kv_gib": -0.1, "total_gib": 139.8}, signature="low")

    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.levers["gpu_memory_utilization"] == 900:
            return Outcome(None, fails_s=30, diagnosis=oom(Kind.OOM_CUDAGRAPH))
        return Outcome(None, fails_s=30, diagnosis=low)

    world = World(policy, script).run(10_000)
    assert len(world.spawns) == 2
    assert world.exit == 69
    assert any("which ran out of memory" in reason for reason in world.decisions[-1].skipped)


def test_backoff_grows_is_capped_and_resets_after_proof() -> None:
    policy = replace(POLICY, backoff=Backoff(2 * SECOND, 2.0, 5 * SECOND), budget=50)
    fault = Diagnosis(Kind.HUB_TRANSIENT, signature="hub")
    world = World(
        policy, lambda spawn, world: Outcome() if spawn.launch == 5 else Outcome(None, fails_s=5, diagnosis=fault)
    ).run()
    waits = [
        after - before
        for (before, name), (after, _) in zip(world.states, world.states[1:], strict=False)
        if name == "backing-off"
    ]
    assert len(waits) == 4
    assert 1.8 <= waits[0] <= 2
    assert 3.6 <= waits[1] <= 4
    assert all(4.5 <= wait <= 5 for wait in waits[2:])
    assert world.state.failures == 0


def test_the_context_is_learnt_from_a_refusal_while_memory_stands_still() -> None:
    """vLLM saw 1.5 GiB less than was sampled, though nobody moved: the next launch must ask for less."""

    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.launch == 1:
            free = (TOTAL - world.foreign) / GIB - 1.5
            numbers = {"free_gib": free, "total_gib": 139.8, "util": 0.9, "requested_gib": 125.82}
            busy = Diagnosis(Kind.GPU_BUSY_FOREIGN, numbers=numbers, signature="busy")
            return Outcome(None, fails_s=20, code=1, diagnosis=busy)
        return Outcome()

    world = World(POLICY, script)
    world.foreign = round(TOTAL * 0.1 - 0.9 * GIB)
    world.run()
    assert [spawn.levers["gpu_memory_utilization"] for spawn in world.spawns] == [900, 894]
    assert world.state.name.value == "serving"


def test_a_profile_run_out_of_memory_lowers_the_declared_multimodal_limits() -> None:
    """Fewer images a prompt are a smaller encoder batch; the utilization could not help here."""
    ladder = (LADDER[0], Rung("limit_mm_per_prompt", use=('{"image": 2}', '{"image": 1}')))
    policy = replace(POLICY, declared=DECLARED.with_(limit_mm_per_prompt='{"image": 4}'), ladder=ladder)

    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.levers["limit_mm_per_prompt"] == '{"image": 1}':
            return Outcome()
        return Outcome(None, fails_s=30, code=1, diagnosis=oom(Kind.OOM_PROFILE))

    world = World(policy, script).run()
    limits = [spawn.levers["limit_mm_per_prompt"] for spawn in world.spawns]
    assert limits == ['{"image": 4}', '{"image": 2}', '{"image": 1}']
    assert {spawn.levers["gpu_memory_utilization"] for spawn in world.spawns} == {900}
    assert world.state.name.value == "serving"
