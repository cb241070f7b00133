"""A hypothesis machine around `decide`: whatever the world answers, in any order, the rules of the design hold."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from days import DECLARED, LADDER
from simulated_days import within_bounds
from supervisord_vllm.core import actions as act
from supervisord_vllm.core.creep import HOUR_NS, Growth
from supervisord_vllm.core.diagnosis import Action, Diagnosis, Kind
from supervisord_vllm.core.facts import (
    BurstDone,
    CanaryDone,
    ClockSeen,
    Commanded,
    CreepSeen,
    DaemonStarted,
    DeviceMemory,
    DeviceSoak,
    Diagnosed,
    Exited,
    Fact,
    GateSampled,
    HealthSeen,
    LedgerSeen,
    LeftoversReaped,
    LoadSeen,
    Pressed,
    ProcessRef,
    ReliefJudged,
    RoomSeen,
    SoakDone,
    Spawned,
    Tick,
    TreeEnded,
)
from supervisord_vllm.core.knowledge import known
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.machine import TABLE, Cell, decide
from supervisord_vllm.core.policy import SECOND, Policy, Proof
from supervisord_vllm.core.remedies import pinned
from supervisord_vllm.core.state import State, StateName, wake_at_ns

MIB = 1 << 20
GIB = 1 << 30
TOTAL = 140 * GIB
POLICY = Policy(
    "stateful",
    DECLARED,
    LADDER,
    on_give_up="stay",
    step_up_ns=600 * SECOND,
    planned_per_day=2,
    max_launches=8,
    allow=frozenset({"planned-recycle"}),
    proof=Proof(),
)
NUMBERS = st.fixed_dictionaries(
    {},
    optional={
        "tried_gib": st.floats(0.01, 8),
        "free_gib": st.floats(0, 4),
        "total_gib": st.just(140.0),
        "available_kv_gib": st.floats(-9, 9),
        "needed_kv_gib": st.floats(0, 20),
        "estimated_max_len": st.integers(0, 9000),
        "weights_gib": st.just(14.3),
        "state_slots": st.integers(1, 20),
    },
)


class Deciding(RuleBasedStateMachine):
    """One daemon. ``living`` is the engine that the shell would own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.state = State.initial()
        self.living: int | None = None
        self.exited = False
        self.held_memory = 0
        self.operated = False
        self.spawned: list[Levers] = []
        self.plans: list[int] = []
        self.restarts: list[int] = []
        self.starts = 0
        self.tell(DaemonStarted(at_ns=0, boot_id="b", next_launch=1, next_decision=1, wall_s=10**9))
        self.tell(LeftoversReaped(at_ns=0))

    def tell(self, fact: Fact) -> None:
        before = self.state
        fact = replace(fact, at_ns=self.now)
        self.state, actions = decide(POLICY, before, fact)
        assert decide(POLICY, before, fact) == (self.state, actions), "the same arguments give the same result"
        entry = TABLE[before.name][type(fact)]
        if self.state.name is not before.name:
            assert isinstance(entry, Cell)
            assert self.state.name in entry.to
        caused = isinstance(
            fact, (GateSampled, Diagnosed, Tick, Pressed, ReliefJudged, Commanded, TreeEnded, HealthSeen)
        )
        assert (
            not actions
            or caused
            or isinstance(fact, (DaemonStarted, LeftoversReaped, Exited, CanaryDone, SoakDone, LoadSeen))
        ), fact
        for action in actions:
            self.carried(action)

    def carried(self, action: act.Action) -> None:
        if isinstance(action, act.Spawn):
            assert self.living is None, "two engines at once"
            within_bounds(POLICY, action.levers)
            if self.spawned and self.spawned[-1] != action.levers and not self.operated:
                assert self.state.launch is not None
                vector = pinned(action.levers, self.state.launch.ledger)
                assert known(POLICY, self.state, self.now).against(vector) is None, "known to fail"
            self.spawned.append(action.levers)
            self.living, self.exited = action.launch, False
            self.starts += 1
            assert self.starts <= POLICY.max_launches or self.operated, "an incident without an end"
        if isinstance(action, act.Proven):
            self.starts = 0
        if isinstance(action, act.Decide):
            decision = action.decision
            assert decision.sentence
            assert decision.moves or decision.action is not Action.NEXT_CONFIG
            if decision.action in (Action.RESTART_SAME, Action.KILL_TREE_RESTART):
                self.restarts = [at for at in self.restarts if at > self.now - POLICY.window_ns] + [self.now]
                assert len(self.restarts) <= POLICY.budget or self.operated
            if decision.kind is Kind.NONE and decision.moves and "step up" in decision.sentence:
                launch = self.state.launch
                assert launch is not None
                assert launch.serving_ns is not None
                assert self.now >= launch.serving_ns + POLICY.step_up_ns
                assert not self.state.held
                self.plans = [at for at in self.plans if at > self.now - 86400 * SECOND] + [self.now]
                assert len(self.plans) <= POLICY.planned_per_day or self.operated

    def devices(self, *, own: int = 0) -> tuple[DeviceMemory, ...]:
        holders = (ProcessRef(9, "ada", "python", self.held_memory),) if self.held_memory else ()
        return (DeviceMemory("GPU-0", TOTAL, max(0, TOTAL - self.held_memory - own), GIB // 2, own, holders),)

    @rule(seconds=st.sampled_from([1, 3, 31, 61, 700, 4000]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds * SECOND
        wake = wake_at_ns(POLICY, self.state)
        if wake is not None and wake <= self.now:
            self.tell(Tick(at_ns=0))

    @rule(size=st.sampled_from([0, 0, 10 * GIB, 40 * GIB, 135 * GIB]))
    def a_neighbour_moves(self, size: int) -> None:
        self.held_memory = size

    @precondition(lambda self: self.state.name is StateName.GATING)
    @rule()
    def the_gate_is_sampled(self) -> None:
        for _ in range(4):
            if self.state.name is StateName.GATING:
                self.tell(GateSampled(at_ns=0, launch=self.state.next_launch, devices=self.devices()))
                self.now += SECOND

    @precondition(lambda self: self.state.name is StateName.STARTING)
    @rule(
        burst=st.sampled_from(["answered", "answered", "failed", "on its way"]), takes=st.sampled_from([0, 0, 30 * GIB])
    )
    def it_comes_up(self, burst: str, takes: int) -> None:
        launch = self.living or 0
        self.tell(Spawned(at_ns=0, launch=launch, pid=1, start_ticks=1, argv=(), log=""))
        self.tell(LedgerSeen(at_ns=0, launch=launch, numbers={"version": "0.26.0", "max_num_batched_tokens": 8192}))
        self.now += 40 * SECOND
        self.tell(HealthSeen(at_ns=0, launch=launch, status=200))
        self.tell(CanaryDone(at_ns=0, launch=launch, ok=True))
        if burst == "on its way":
            return
        self.tell(BurstDone(at_ns=0, launch=launch, ok=burst == "answered", requests=16, failed=3))
        self.now += 31 * SECOND
        self.tell(Tick(at_ns=0))
        asked = self.state.launch is not None and self.state.launch.weighed
        assert asked is (burst == "answered"), "a soak is weighed, and only after a burst that was answered"
        util = self.state.launch.levers.number("gpu_memory_utilization") if self.state.launch is not None else None
        own = (util or 900) * TOTAL // 1000
        soak = DeviceSoak("GPU-0", TOTAL, GIB // 2, own, own + takes, own + takes, TOTAL - own, TOTAL - own - takes, 15)
        self.tell(SoakDone(at_ns=0, launch=launch, devices=(soak,)))
        self.tell(LoadSeen(at_ns=0, launch=launch))

    @precondition(lambda self: self.living is not None and not self.exited)
    @rule(kind=st.sampled_from(Kind), numbers=NUMBERS, grew=st.booleans())
    def it_fails(self, kind: Kind, numbers: dict[str, float], grew: bool) -> None:
        launch = self.living or 0
        if grew:
            self.held_memory = 40 * GIB
        self.exited = True
        self.tell(Exited(at_ns=0, launch=launch, code=0))
        verdict = Diagnosis(kind, numbers=numbers, signature=kind.value)
        self.tell(
            Diagnosed(at_ns=0, launch=launch, diagnosis=verdict, devices=self.devices(own=GIB), after=self.devices())
        )
        self.the_tree_ends()

    @precondition(lambda self: self.living is not None and self.state.name is StateName.STOPPING)
    @rule()
    def the_tree_ends(self) -> None:
        launch = self.living or 0
        if not self.exited:
            self.exited = True
            self.tell(Exited(at_ns=0, launch=launch, signal=15))
            self.tell(Diagnosed(at_ns=0, launch=launch, diagnosis=Diagnosis(Kind.NONE), after=self.devices()))
        self.living = None
        self.tell(TreeEnded(at_ns=0, launch=launch))

    @precondition(lambda self: self.state.name is StateName.SERVING)
    @rule(running=st.integers(0, 2))
    def load_changes(self, running: int) -> None:
        self.tell(LoadSeen(at_ns=0, launch=self.living or 0, running=running))

    @precondition(lambda self: self.state.name is StateName.SERVING)
    @rule()
    def room_is_seen(self) -> None:
        self.tell(RoomSeen(at_ns=0, launch=self.living or 0, devices=self.devices(own=20 * GIB)))

    @precondition(lambda self: self.state.name is StateName.SERVING)
    @rule(verdict=st.sampled_from(["kv", "slot", "compute"]), sequences=st.sampled_from([None, 3, 40]))
    def it_is_pressed(self, verdict: str, sequences: int | None) -> None:
        fact = Pressed(at_ns=0, verdict=verdict, loss=0.5, lost_s=90, cost_s=60, sequences=sequences)  # type: ignore[arg-type]
        self.tell(replace(fact, launch=self.living or 0))

    @precondition(lambda self: self.state.name is StateName.SERVING)
    @rule(keep=st.booleans())
    def a_relief_is_judged(self, keep: bool) -> None:
        self.tell(ReliefJudged(at_ns=0, launch=self.living or 0, keep=keep))

    @precondition(lambda self: self.state.name is StateName.SERVING)
    @rule(rate=st.sampled_from([None, MIB, 300 * MIB]), free=st.sampled_from([0, GIB, 40 * GIB]))
    def memory_creeps(self, rate: int | None, free: int) -> None:
        growth = None if rate is None else Growth("GPU-0", self.now, rate, rate, rate, 4 * HOUR_NS, 20 * GIB, free)
        self.tell(CreepSeen(at_ns=0, launch=self.living or 0, growth=growth))

    @rule(hours=st.integers(-3, 30), offset=st.integers(-12, 14))
    def the_clock_is_set(self, hours: int, offset: int) -> None:
        wall = self.state.wall_s(self.now) + hours * 3600
        self.tell(ClockSeen(at_ns=0, wall_s=wall, utc_offset_s=offset * 3600))

    @rule(seconds=st.integers(1, 5000))
    def an_operator_holds_for_a_time(self, seconds: int) -> None:
        self.held(Commanded(at_ns=0, verb="hold", for_ns=seconds * SECOND))
        assert self.state.hold is not None

    def held(self, fact: Commanded) -> None:
        """A hold that takes a step up back while it drains gives its planned restart back."""
        draining = self.state.draining
        self.tell(fact)
        probe = draining.plan.probe if draining is not None and draining.plan is not None else None
        if draining is not None and draining.counted and probe is not None and probe.why == "step-up":
            self.plans.pop()

    @rule(verb=st.sampled_from(["stop", "start", "hold", "resume", "restart", "drain", "reset", "step"]))
    def an_operator_speaks(self, verb: str) -> None:
        if verb not in ("hold", "resume"):
            self.operated = True
        said = Commanded(at_ns=0, verb=verb, lever="max_num_seqs", direction="down")  # type: ignore[arg-type]
        if verb == "hold":
            self.held(said)
        else:
            self.tell(said)
        if self.state.name is StateName.ADOPTING:
            self.living = None  # what could not be ended before is ended now
            self.tell(LeftoversReaped(at_ns=0))

    @invariant()
    def a_hold_that_is_over_is_gone_and_one_that_is_not_has_its_timer(self) -> None:
        hold = self.state.hold
        if hold is not None and hold.until_ns is not None:
            wake = wake_at_ns(POLICY, self.state)
            assert wake is not None
            assert wake <= hold.until_ns

    @invariant()
    def an_engine_lives_only_where_the_state_says_so(self) -> None:
        resting = (StateName.STOPPED, StateName.GATING, StateName.BACKING_OFF, StateName.GIVEN_UP)
        last = self.state.last_decision
        stuck = last is not None and last.kind is Kind.STOP_HANG  # it says that a process of ours cannot be ended
        if stuck and self.state.name in (StateName.GIVEN_UP, StateName.STOPPED):
            return
        assert not (self.living is not None and self.state.name in resting)
        assert not (self.state.ready and self.living is None)


Deciding.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDeciding = Deciding.TestCase
