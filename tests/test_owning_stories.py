"""Owning the process, decided in virtual time: hangs, wedged starts, the kernel's witness, a stop asked for twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisord_vllm.core import actions as act
from supervisord_vllm.core import outside
from supervisord_vllm.core.diagnosis import Action, Diagnosis, Evidence, Kind
from supervisord_vllm.core.facts import DevicesSeen, Fact, KernelSeen, OomKilled, ProcessRef, Stalled, TreeEnded
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import StateName
from supervisord_vllm.engine import circumstance
from world import Outcome, World

POLICY = Policy("p", Levers({"gpu_memory_utilization": 900, "max_num_seqs": 16}))
DEAD = Diagnosis(Kind.ENGINE_DEAD, "runtime", signature="dead")


def dies_once(spawn: act.Spawn, world: World) -> Outcome:
    return Outcome(fails_s=200, diagnosis=DEAD) if spawn.launch == 1 else Outcome()


def witness(world: World, fact: Fact) -> None:
    """A fact that comes while launch 1 serves."""
    world.run(100)
    world.send(0, fact)
    world.run(1000)


def test_a_hang_ends_the_tree_without_grace_and_starts_the_same_again() -> None:
    world = World(POLICY, lambda spawn, world: Outcome())
    world.run(100)
    state, actions = decide(POLICY, world.state, Stalled(at_ns=world.now, launch=1, what="hung", text="no token"))
    assert state.name is StateName.STOPPING
    assert actions == (act.Stop(1, "hung"),)
    witness(world, Stalled(at_ns=0, launch=1, what="hung", text="no token came out for 90 s"))
    assert world.decisions[0].kind is Kind.ENGINE_HUNG
    assert world.decisions[0].action is Action.KILL_TREE_RESTART
    assert "hangs: no token came out for 90 s" in world.decisions[0].sentence
    assert [spawn.levers for spawn in world.spawns] == [POLICY.declared] * 2
    assert world.state.name.value == "serving"


def test_a_wedged_start_is_ended_and_leftovers_are_moved_aside_once_in_an_incident() -> None:
    def script(spawn: act.Spawn, world: World) -> Outcome:
        if spawn.launch < 3:
            world.send(30, Stalled(at_ns=0, launch=spawn.launch, what="wedged", text="no new line for 600 s"))
            return Outcome(healthy_s=None)
        return Outcome()

    world = World(POLICY, script).run()
    assert [decision.kind for decision in world.decisions] == [Kind.STARTUP_WEDGED] * 2
    assert world.cleaned == [1], "the second time nothing is left that the first look did not see"
    assert "does not come up: no new line for 600 s" in world.decisions[0].sentence
    assert world.state.name.value == "serving"


@pytest.mark.parametrize("what", ["hung", "wedged"])
def test_a_verdict_about_another_time_of_the_launch_is_ignored(what: str) -> None:
    starting = World(POLICY, lambda spawn, world: Outcome(healthy_s=None))
    starting.run(5)
    serving = World(POLICY, lambda spawn, world: Outcome())
    serving.run(100)
    world = starting if what == "hung" else serving
    fact = Stalled(at_ns=world.now, launch=1, what=what, text="late")  # type: ignore[arg-type]
    assert decide(POLICY, world.state, fact) == (world.state, ())


def test_a_death_that_no_line_explains_is_host_memory_where_the_kernel_says_so() -> None:
    world = World(POLICY, dies_once)
    witness(world, OomKilled(at_ns=0, launch=1, count=1))
    assert world.decisions[0].kind is Kind.HOST_OOM
    assert "OOM killer ended 1 process" in world.decisions[0].sentence
    assert world.exit == 69


def test_a_cause_in_the_log_is_stronger_than_a_kill_for_memory() -> None:
    oom = Diagnosis(Kind.BAD_CONFIG, signature="flag")
    world = World(POLICY, lambda spawn, world: Outcome(fails_s=200, diagnosis=oom))
    witness(world, OomKilled(at_ns=0, launch=1, count=1))
    assert world.decisions[0].kind is Kind.BAD_CONFIG


def xid(number: int, ours: bool | None = True) -> KernelSeen:
    return KernelSeen(
        at_ns=0, launch=1, kind="xid", text=f"NVRM: Xid (PCI:0000:3b:00): {number}", number=number, ours=ours
    )


def test_an_xid_on_our_card_while_it_serves_is_only_noted_and_at_a_death_it_stops_and_calls() -> None:
    world = World(POLICY, dies_once)
    world.run(100)
    world.send(0, xid(79))
    world.run(5)
    assert world.state.name.value == "serving"
    assert world.decisions == []
    world.run(1000)
    decision = world.decisions[0]
    assert (decision.kind, decision.action) == (Kind.GPU_HW_FAULT, Action.STOP_OPERATOR)
    assert decision.evidence[0].text == "NVRM: Xid (PCI:0000:3b:00): 79"
    assert world.exit == 69


@pytest.mark.parametrize("fact", [xid(79, ours=False), xid(31)], ids=["another card", "a fault of software"])
def test_an_xid_of_another_card_or_of_software_is_no_broken_card(fact: KernelSeen) -> None:
    world = World(POLICY, dies_once)
    witness(world, fact)
    assert world.decisions[0].kind is Kind.ENGINE_DEAD
    assert world.state.name.value == "serving"


@pytest.mark.parametrize("number", [63, 94])
def test_a_contained_error_is_tried_once_more_with_the_same(number: int) -> None:
    world = World(POLICY, dies_once)
    witness(world, xid(number))
    assert world.decisions[0].kind is Kind.GPU_HW_FAULT
    assert world.decisions[0].action is Action.RESTART_SAME
    assert world.state.name.value == "serving"


def test_a_vanished_gpu_stops_and_calls_and_memory_that_cannot_be_read_alone_does_not() -> None:
    gone = World(POLICY, dies_once)
    witness(gone, DevicesSeen(at_ns=0, error="NVML: GPU is lost", vanished=True))
    assert gone.decisions[0].action is Action.STOP_OPERATOR
    mute = World(POLICY, dies_once)
    witness(mute, DevicesSeen(at_ns=0, error="device memory has not answered for 45 s"))
    assert mute.decisions[0].kind is Kind.ENGINE_DEAD
    assert mute.state.memory_error is not None


@pytest.mark.parametrize("verb", ["stop", "shutdown"])
def test_a_stop_asked_for_twice_is_forced_once(verb: str) -> None:
    world = World(POLICY, lambda spawn, world: Outcome())
    for at_s in (100, 100.1, 100.2):
        world.command(verb, at_s)  # type: ignore[arg-type]
    world.run(200)
    assert world.forced == [1]
    assert world.state.name.value == "stopped"


def test_a_stop_and_then_a_shutdown_is_not_forced_yet() -> None:
    world = World(POLICY, lambda spawn, world: Outcome())
    world.command("stop", 100)
    world.command("shutdown", 100.1)
    world.run(200)
    assert world.forced == []
    assert world.exit == 0


def test_what_cannot_be_ended_is_named_with_its_state() -> None:
    world = World(POLICY, lambda spawn, world: Outcome())
    world.run(100)
    stuck = ProcessRef(4711, "root", "VLLM::Worker_TP0", ours=True, state="D in nvidia_ioctl")
    world.command("stop")
    world.run(0.5)
    world.step(TreeEnded(at_ns=world.now, launch=1, survivors=(stuck,)))
    assert world.decisions[0].kind is Kind.STOP_HANG
    assert "pid 4711 (VLLM::Worker_TP0, state D in nvidia_ioctl)" in world.decisions[0].sentence
    assert world.exit == 69


def test_a_tree_that_is_never_reported_gone_ends_in_given_up_at_the_stops_own_deadline() -> None:
    policy = replace(POLICY, stop_deadline_ns=700 * SECOND, on_give_up="stay")
    world = World(policy, lambda spawn, world: Outcome())
    world.run(100)
    state, _ = decide(policy, world.state, Stalled(at_ns=world.now, launch=1, what="hung", text="x"))
    world.state, world.queue = state, []
    begun = world.elapsed()
    world.run(2000)
    assert world.state.name.value == "given-up"
    assert world.elapsed() >= begun + 700


def test_the_core_and_the_classifier_call_the_same_xids_hardware() -> None:
    assert outside.HARDWARE_XIDS == circumstance.HARDWARE_XIDS | circumstance.CONTAINED_XIDS


@pytest.mark.parametrize(("said", "kind"), [("Fatal", Kind.GPU_HW_FAULT), ("Non-fatal", Kind.ENGINE_DEAD)])
def test_a_switch_is_broken_only_where_it_says_fatal(said: str, kind: Kind) -> None:
    world = World(POLICY, dies_once)
    text = f"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, {said}, Link 30"
    witness(world, KernelSeen(at_ns=0, launch=1, kind="sxid", text=text, number=20034))
    assert world.decisions[0].kind is kind


def test_where_the_classifier_saw_the_kernels_word_already_it_comes_first_in_the_sentence() -> None:
    verdict = Diagnosis(Kind.HOST_OOM, evidence=(Evidence(9, "APIServer", "engine core exited"),), signature="oom")
    world = World(POLICY, lambda spawn, world: Outcome(fails_s=200, diagnosis=verdict))
    witness(world, OomKilled(at_ns=0, launch=1, count=2))
    assert "OOM killer ended 2 process(es)" in world.decisions[0].sentence
    assert [line.text for line in world.decisions[0].evidence][-1] == "engine core exited"
