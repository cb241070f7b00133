"""The strain: what it says of pages, what it learns and remembers, and what does not count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisord_vllm.core.facts import DeviceMemory, Fact, Pressed, ReliefJudged, Spawned, TreeEnded
from supervisord_vllm.core.ledger import Ledger
from supervisord_vllm.core.levers import Levers, Rung
from supervisord_vllm.core.overload import engines_needed
from supervisord_vllm.core.policy import SECOND, Policy, Pressure
from supervisord_vllm.core.pressure import Sample
from supervisord_vllm.core.restart_cost import Restarts
from supervisord_vllm.core.state import Ending, Launch, Probe, State, StateName
from supervisord_vllm.store import Store
from supervisord_vllm.strain import Strain

INF = float("inf")
DECLARED = Levers({"gpu_memory_utilization": 900, "max_model_len": 8192, "max_num_seqs": 16})
RUNGS = (Rung("max_num_seqs", factor=0.5, min=4, max=64), Rung("enforce_eager"))
POLICY = Policy("p", DECLARED, RUNGS, pressure=Pressure(ttft_ns=5 * SECOND), fingerprint="f", surroundings="s")
TOTAL = 80 << 30


class Life:
    """A strain with its memory and what it said; pages come every 5 s."""

    def __init__(self, policy: Policy = POLICY, memory: dict[str, Any] | None = None) -> None:
        self.policy = policy
        self.memory = {} if memory is None else memory
        self.said: list[Fact] = []
        self.strain = Strain(policy, self.memory.get, self._keep, self.said.append)
        self.at = 0
        self.fast = self.slow = 0
        self.state = serving(policy.declared)

    def _keep(self, key: str, value: object) -> None:
        self.memory[key] = json.loads(json.dumps(value))

    def page(self, fast: int = 0, slow: int = 0, *, running: int = 16, waiting: int = 0, kv: float = 0.3) -> None:
        """Five seconds with so many first tokens within half a second, and so many after 7 to 10 s."""
        self.at += 5
        self.fast += fast
        self.slow += slow
        done = self.fast + self.slow
        self.strain.page(
            self.state,
            Sample(
                self.at * SECOND,
                running,
                waiting,
                kv,
                prompt_tokens=500 * done,
                generation_tokens=300 * done,
                finished=done,
                ttft=((0.5, self.fast), (7.0, self.fast), (10.0, done), (INF, done)),
            ),
            kv_tokens=40_000,
        )

    def pressed(self) -> list[Pressed]:
        return [fact for fact in self.said if isinstance(fact, Pressed)]


def origin(life: Life) -> str:
    """Where its targets come from."""
    return life.strain.view.origin


def serving(levers: Levers, number: int = 1, probe: Probe | None = None) -> State:
    device = DeviceMemory("GPU-0", TOTAL, TOTAL, 0)
    launch = Launch(
        number, levers, levers, 0, (device,), ledger=Ledger({}), ready=True, proven=True, probe=probe, ready_ns=0
    )
    return State(StateName.SERVING, 0, levers, launch, next_launch=number + 1)


def test_a_queue_before_few_slots_is_said_once_it_has_cost_a_restart() -> None:
    life = Life()
    for _ in range(13):
        life.page(slow=8, waiting=30)
    (said,) = life.pressed()
    assert (said.verdict, said.launch, said.cost_s, said.lost_s) == ("slot", 1, 60.0, 60.0)
    assert said.sequences == 50
    assert said.text == "16 run, 30 wait, 30% of the KV cache is used"
    assert life.strain.view.curable


def test_pages_of_a_launch_that_does_not_serve_yet_say_nothing() -> None:
    life = Life()
    life.state = replace(life.state, name=StateName.PROVING)
    for _ in range(40):
        life.page(slow=8, waiting=30)
    assert life.said == []


def test_a_page_that_could_not_be_read_adds_nothing() -> None:
    life, blind = Life(), Life()
    for number in range(12):
        for each in (life, blind):
            each.page(slow=8, waiting=30)
        if number % 2:
            blind.strain.missed()
    assert life.strain.view.lost_s == 55
    assert blind.strain.view.lost_s == 30
    blind.strain.missed()
    blind.strain.missed()
    assert blind.strain.view.missed == 3
    blind.page()
    assert blind.strain.view.missed == 0


def test_an_engine_from_which_nothing_comes_is_not_called_slow() -> None:
    life = Life()
    life.page(slow=8, waiting=30)
    for _ in range(40):
        life.page(waiting=30)
    assert life.strain.view.lost_s == 200, "it is lost all the same"
    assert life.said == []
    life.page(slow=1, waiting=30)
    assert len(life.pressed()) == 1, "slow after all"


def test_a_machine_that_slept_lost_a_minute_at_most() -> None:
    life = Life()
    life.page(slow=8, waiting=30)
    life.at += 8 * 3600
    life.page(slow=8, waiting=30)
    assert life.strain.view.lost_s == 60


def test_where_nothing_permitted_helps_an_alert_with_numbers_is_said() -> None:
    life = Life(replace(POLICY, ladder=()))
    for number in range(13):
        life.page(slow=8, waiting=30 + 24 * number)
    (said,) = life.pressed()
    assert said.engines == pytest.approx(4.0), "32 come for each 8 that are finished"
    assert not life.strain.view.curable
    assert life.strain.view.engines == said.engines


def test_each_roll_back_of_a_verdict_doubles_its_price() -> None:
    life = Life()
    life.state = replace(life.state, roll_backs={"slot": 1})
    for _ in range(24):
        life.page(slow=8, waiting=30)
    assert life.pressed() == []
    life.page(slow=8, waiting=30)
    assert len(life.pressed()) == 1
    assert life.strain.view.worth_s == 120


def test_without_declared_targets_twice_of_what_was_seen_at_the_declared_levers_is_one_and_is_kept() -> None:
    policy = replace(POLICY, pressure=Pressure())
    life = Life(policy)
    for _ in range(10):
        life.page(fast=10)
    assert origin(life) == "none"
    for _ in range(15):
        life.page(fast=10)
    assert origin(life) == "learnt"
    assert life.strain.targets.ttft_ns == pytest.approx(0.95 * SECOND)
    again = Life(policy, life.memory)
    assert again.strain.targets.ttft_ns == life.strain.targets.ttft_ns, "it survives the daemon"
    other = Life(replace(policy, fingerprint="other"), life.memory)
    assert other.strain.targets.ttft_ns is None, "and belongs to its policy"


def test_what_was_learnt_and_measured_is_in_the_store_of_the_next_daemon(tmp_path: Path) -> None:
    policy = replace(POLICY, pressure=Pressure())

    def opened() -> tuple[Store, Strain]:
        store = Store.open(tmp_path / "history.sqlite3", warn=pytest.fail)
        return store, Strain(policy, store.get_meta, store.set_meta, lambda fact: None)

    store, strain = opened()
    life = Life(policy)
    life.strain = strain
    for _ in range(25):
        life.page(fast=10)
    stopping = replace(life.state, name=StateName.STOPPING, ending=Ending("planned", 0))
    strain.noted(stopping, replace(stopping, ending=None), TreeEnded(at_ns=7 * SECOND))
    assert store.close()
    store, again = opened()
    assert again.targets == strain.targets
    assert again.targets.ttft_ns is not None
    assert Restarts.from_json(store.get_meta("restarts:s")).stops == (7.0,)
    assert store.close()


@pytest.mark.parametrize("kept", [None, 7, [], {"ttft_ns": "x"}, {"ttft_ns": -1}, {"ttft_ns": True}])
def test_a_remembered_value_that_is_none_is_forgotten(kept: object) -> None:
    memory = {"pressure-learnt:f": kept, "pressure-before:f": kept, "restarts:s": kept}
    life = Life(replace(POLICY, pressure=Pressure()), memory)
    assert life.strain.targets.ttft_ns is None
    assert Restarts.from_json(kept) == Restarts()


def test_nothing_is_learnt_below_the_declared_levers_nor_while_requests_wait() -> None:
    policy = replace(POLICY, pressure=Pressure())
    degraded, queued = Life(policy), Life(policy)
    degraded.state = serving(Levers({**DECLARED, "max_num_seqs": 8}))
    eager = Life(policy)
    eager.state = serving(Levers({**DECLARED, "enforce_eager": True}))
    for _ in range(60):
        degraded.page(fast=10)
        eager.page(fast=10)
        queued.page(slow=10, waiting=9)
    for life in (degraded, eager, queued):
        assert life.strain.view.origin == "none"
        assert life.said == []


def test_a_restart_costs_what_own_starts_and_planned_stops_took_cold_where_it_compiles_anew() -> None:
    life = Life()
    assert life.state.launch is not None
    starting = replace(
        life.state, name=StateName.STARTING, launch=replace(life.state.launch, ready=False, spawned_ns=0)
    )
    for seconds, cold in ((100, True), (60, False), (62, False)):
        launch = replace(
            life.state.launch,
            ready_ns=seconds * SECOND,
            ledger=Ledger({"compile_cold_s": 20.0} if cold else {}),
        )
        after = replace(starting, name=StateName.PROVING, launch=launch)
        life.strain.noted(starting, after, Spawned(at_ns=seconds * SECOND, pid=1, start_ticks=1, argv=(), log=""))
    for why, seconds in (("planned", 5), ("failure", 500)):
        stopping = replace(life.state, name=StateName.STOPPING, ending=Ending(why, 0))  # type: ignore[arg-type]
        life.strain.noted(stopping, replace(stopping, ending=None), TreeEnded(at_ns=seconds * SECOND))
    assert Restarts.from_json(life.memory["restarts:s"]) == Restarts((60.0, 62.0), (100.0,), (5.0,))
    for _ in range(23):
        life.page(slow=8, waiting=30)
    assert life.pressed()[0].cost_s == 105, "more sequences compile anew"
    assert life.strain.view.worth_s == 105
    assert Restarts.from_json(life.memory["restarts:s"]).cost_s(60, cold=False) == 66


def test_a_first_cold_start_costs_at_least_the_guess() -> None:
    assert Restarts().cost_s(60, cold=True) == 60
    assert Restarts((20.0,)).cost_s(60, cold=True) == 60
    assert Restarts((90.0,)).cost_s(60, cold=True) == 90
    assert Restarts((20.0,)).cost_s(60, cold=False) == 20


def changed(life: Life) -> None:
    """After the change: launch 2 with more sequences serves, on trial."""
    levers = Levers({**DECLARED, "max_num_seqs": 50})
    life.state = serving(levers, 2, Probe(DECLARED, "pressure", "slot"))
    life.strain.noted(life.state, life.state, Spawned(at_ns=life.at, launch=2, pid=2, start_ticks=1, argv=(), log=""))
    life.fast = life.slow = 0
    life.page()


@pytest.mark.parametrize(("fast", "slow", "keep"), [(8, 0, True), (0, 8, False)])
def test_a_change_is_judged_by_two_hundred_first_tokens_of_a_like_load(fast: int, slow: int, keep: bool) -> None:
    life = Life()
    for _ in range(13):
        life.page(slow=8, waiting=30)
    changed(life)
    resumed = Life(memory=life.memory)  # a daemon that was killed in between
    resumed.state = life.state
    for each in (life, resumed):
        each.said.clear()
        if each is resumed:
            each.page()
        for _ in range(24):
            each.page(fast, slow, running=20, waiting=0 if keep else 30)
        assert each.said == [], "192 first tokens are too few"
        each.page(fast, slow, running=20, waiting=0 if keep else 30)
        (said,) = each.said
        assert isinstance(said, ReliefJudged)
        assert (said.keep, said.launch) == (keep, 2)
        assert "late at" in said.text


def test_a_change_that_cannot_be_judged_for_half_an_hour_is_kept() -> None:
    life = Life()
    for _ in range(13):
        life.page(slow=8, waiting=30)
    changed(life)
    life.said.clear()
    for _ in range(359):
        life.page(fast=1, running=1)
    assert life.said == []
    life.page(fast=1, running=1)
    (said,) = life.said
    assert isinstance(said, ReliefJudged)
    assert said.keep


TTFT = Pressure(ttft_ns=5 * SECOND)


def stretch(pages: int, came: int, done: int, waiting: int, *, running: int = 20) -> list[Sample]:
    """Pages every 5 s: so many requests come and are finished in each, from a queue of ``waiting`` on."""
    return [
        Sample(
            n * 5 * SECOND, running, waiting + n * (came - done), finished=n * done, ttft=((5.0, 0), (INF, n * done))
        )
        for n in range(pages)
    ]


def test_where_a_queue_grows_the_lack_is_one_of_rates() -> None:
    assert engines_needed(TTFT, stretch(60, 17, 10, 0)) == pytest.approx(1.7)


def test_where_a_queue_stands_the_lack_is_one_of_places() -> None:
    """2 requests/s: 10 of the 30 that wait do so within the target of 5 s, the other 20 need as many places again."""
    assert engines_needed(TTFT, stretch(60, 10, 10, 30)) == pytest.approx(2.0)
    assert engines_needed(TTFT, stretch(60, 10, 10, 8)) == 1.0


def test_where_tokens_come_too_slowly_the_share_above_the_target_tells() -> None:
    targets = Pressure(inter_token_ns=SECOND // 10)
    pages = [
        replace(page, inter_token=((0.2, 0), (0.3, 100 * n), (INF, 100 * n)))
        for n, page in enumerate(stretch(9, 1, 1, 0))
    ]
    assert engines_needed(targets, pages) == pytest.approx(2.95)


def test_without_finished_requests_nothing_is_estimated() -> None:
    assert engines_needed(TTFT, stretch(60, 10, 0, 0)) is None
    assert engines_needed(TTFT, stretch(1, 1, 1, 1)) is None
