"""Pressure: what slowness costs, which resource binds, when a restart pays, and when its change is taken back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisord_vllm.core.policy import SECOND, Pressure
from supervisord_vllm.core.pressure import (
    Episode,
    Histogram,
    Measure,
    Sample,
    binding,
    default_targets,
    late_share,
    loss,
    measure,
    quantile,
    request_tokens,
    restart_cost_s,
    sequences_held,
    verdict_on,
)
from supervisord_vllm.core.watch import Terms, Watch

INF = float("inf")
TTFT = Pressure(ttft_ns=5 * SECOND)


def histogram(fast: int, slow: int) -> Histogram:
    """``fast`` answers below 2.5 s, ``slow`` between 5 and 7.5 s."""
    return ((2.5, fast), (5.0, fast), (7.5, fast + slow), (INF, fast + slow))


def page(second: float, fast: int = 0, slow: int = 0, waiting: int = 0, running: int = 8, **more: object) -> Sample:
    return Sample(int(second * SECOND), running, waiting, ttft=histogram(fast, slow), **more)  # type: ignore[arg-type]  # fields of Sample


def test_the_late_share_is_linear_within_the_bucket() -> None:
    assert late_share((), histogram(50, 50), 5.0) == 0.5
    assert late_share((), histogram(50, 50), 6.25) == 0.25
    assert late_share(histogram(50, 50), histogram(150, 50), 5.0) == 0.0
    assert late_share(histogram(5, 5), histogram(5, 5), 5.0) is None


def test_five_in_a_hundred_late_is_what_a_95th_percentile_permits() -> None:
    assert loss(TTFT, page(0), page(5, 95, 5)) == pytest.approx(0.0)
    assert loss(TTFT, page(0), page(5, 0, 100)) == pytest.approx(1.0)
    assert loss(Pressure(), page(0), page(5, 0, 100)) == 0.0, "no target, no loss"


def test_requests_that_wait_without_any_answer_are_a_whole_loss() -> None:
    assert loss(TTFT, page(0), page(5, waiting=3)) == pytest.approx(1.0)
    assert loss(TTFT, page(0), page(5)) == 0.0


def test_the_quantile_is_found_in_its_bucket() -> None:
    assert quantile((), histogram(100, 0), 0.95) == pytest.approx(2.375)
    assert quantile((), (), 0.95) is None


def test_preemptions_mean_the_kv_cache_and_a_full_cache_alone_does_not() -> None:
    rising = [page(0, waiting=2, preemptions=0), page(5, waiting=2, preemptions=9)]
    assert binding(rising, 256) == "kv"
    cached = [page(0, running=2, kv_usage=0.99), page(5, running=2, kv_usage=0.99)]
    assert binding(cached, 256) == "compute", "nobody waits: that is prefix caching"
    full = [page(at, running=20, waiting=5, kv_usage=0.97) for at in (0, 5, 10)]
    assert binding(full, 256) == "kv"


def test_slots_bind_when_nearly_always_as_many_run_as_may_and_the_cache_has_room() -> None:
    slots = [page(at, running=16, waiting=5, kv_usage=0.3) for at in range(0, 50, 5)]
    assert binding(slots, 16) == "slot"
    assert (
        binding([*slots[:7], *[page(at, running=9, waiting=5, kv_usage=0.3) for at in (50, 55, 60)]], 16) == "compute"
    )
    assert binding([page(at, running=16, waiting=5, kv_usage=0.92) for at in (0, 5)], 16) == "compute"


def test_the_target_of_sequences_is_that_of_capture_30() -> None:
    assert sequences_held(60_128, 814) == 73
    assert sequences_held(None, 814) is None
    window = [page(0), page(60, prompt_tokens=51_200, generation_tokens=30_200, finished=100)]
    assert request_tokens(window) == 814


def test_a_restart_costs_the_median_of_our_own() -> None:
    assert restart_cost_s([], 60) == 60
    assert restart_cost_s([70, 400, 90], 60) == 90


def test_an_episode_runs_while_the_verdict_is_the_same_and_ends_after_a_calm() -> None:
    running = (
        Episode().after("slot", 1.0, 40, 0, 30, curable=True).after("slot", 0.5, 40, 40 * SECOND, 30, curable=True)
    )
    assert running.lost_s == 60
    assert running.due(60, 0)
    assert not running.due(60, 1), "each roll-back doubles the price"
    assert running.after("kv", 1.0, 5, 45 * SECOND, 30, curable=True).lost_s == 5
    assert running.after("compute", 1.0, 5, 45 * SECOND, 30, curable=False).lost_s == 0
    calm = running.after("slot", 0.0, 5, 100 * SECOND, 30, curable=True)
    assert calm.lost_s == 60
    assert calm.after("slot", 0.0, 5, 699 * SECOND, 30, curable=True).lost_s == 60
    assert calm.after("slot", 0.0, 5, 700 * SECOND, 30, curable=True).lost_s == 0


@given(
    st.lists(st.tuples(st.floats(0.06, 1), st.floats(1, 60)), min_size=1, max_size=200),
    st.floats(10, 300),
    st.integers(0, 3),
)
def test_what_is_lost_before_a_restart_is_bounded_by_its_price(
    steps: list[tuple[float, float]], cost: float, roll_backs: int
) -> None:
    """Ski rental: at the moment of acting at most one step more than 2^k * C was lost."""
    episode, now = Episode(), 0.0
    for lost, seconds in steps:
        before = episode.lost_s
        now += seconds
        episode = episode.after("kv", lost, seconds, int(now * SECOND), cost, curable=True)
        if episode.due(cost, roll_backs):
            assert before < 2**roll_backs * cost
            assert episode.lost_s <= 2**roll_backs * cost + seconds
            break


def test_a_watch_takes_the_first_page_and_one_that_counts_less_as_a_baseline() -> None:
    terms = Terms(TTFT, sequences=8, cost_s=10)
    watch = Watch().scraped(page(0, 100, 100), terms)
    assert watch.loss == 0
    watch = watch.scraped(page(5, 100, 150, waiting=4), terms)
    assert watch.loss == pytest.approx(1.0)
    assert len(watch.scraped(page(10), terms).window) == 1, "the engine was started anew"


def test_a_watch_is_due_after_the_price_of_a_restart() -> None:
    terms, watch = Terms(TTFT, sequences=8, kv_tokens=1000, cost_s=30), Watch()
    due = []
    for at in range(0, 60, 5):
        counted = {"prompt_tokens": at * 80, "generation_tokens": at * 20, "finished": at}
        watch = watch.scraped(page(at, 0, at, waiting=5, kv_usage=0.5, **counted), terms)
        due.append(watch.due(terms))
    assert due.index("slot") == 6
    assert watch.episode.verdict == "slot"
    assert watch.sequences(terms) == 10


def test_without_a_target_twice_of_what_was_proven_is_one() -> None:
    assert default_targets(TTFT, page(0), page(5, 10)) == TTFT
    made = default_targets(Pressure(), page(0), page(5, 100))
    assert made.ttft_ns == pytest.approx(4.75 * SECOND)
    assert made.queue_ns is None


def test_a_change_is_taken_back_only_if_the_loss_did_not_fall_under_a_like_load() -> None:
    before = Measure(100, 300, 50)
    assert verdict_on(before, Measure(100, 310, 60)) == "roll-back"
    assert verdict_on(before, Measure(100, 310, 20)) == "keep"
    assert verdict_on(before, Measure(100, 100, 90)) is None, "too few to tell"
    assert verdict_on(before, Measure(100, 900, 90)) is None, "another load"
    assert verdict_on(before, Measure(1800, 100, 90)) == "keep"


def test_a_stretch_of_service_is_measured_from_its_pages() -> None:
    made = measure(TTFT, [page(0), page(10, 0, 100), page(20, 100, 100)])
    assert (made.seconds, made.first_tokens) == (20, 200)
    assert made.lost_s == pytest.approx(10)
    assert measure(TTFT, [page(0)]) == Measure()
