"""Creep: the rate of a growth that is there is found, and nothing else is called one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord_vllm.core.creep import (
    EVERY_NS,
    HOST,
    HOUR_NS,
    LEAST,
    SETTLING_NS,
    CreepWatch,
    Growth,
    Point,
    creep_matters,
    grown,
    theil_sen,
)
from supervisord_vllm.core.facts import DeviceMemory
from supervisord_vllm.core.ledger import GIB, MIB

QUICK = settings(derandomize=True, deadline=None, max_examples=40)
TOTAL = 80 * GIB
START = 60 * GIB


def line(count: int, per_hour: int, noise: random.Random | None = None, sigma: float = 0.0) -> list[Point]:
    return [
        (i * EVERY_NS, START + per_hour * i * EVERY_NS // HOUR_NS + (round(noise.gauss(0, sigma)) if noise else 0))
        for i in range(count)
    ]


@QUICK
@given(st.integers(10, 100), st.integers(-2000 * MIB, 2000 * MIB), st.data())
def test_a_fifth_of_wild_samples_does_not_move_the_rate(count: int, per_hour: int, data: st.DataObject) -> None:
    points = line(count, per_hour)
    for index in data.draw(st.lists(st.integers(0, count - 1), max_size=count // 5, unique=True)):
        points[index] = (points[index][0], data.draw(st.integers(0, TOTAL)))
    slope, low, high = theil_sen(points)
    assert low <= slope <= high
    # Of the pairs, at most 36 % touch a wild sample; the median of the rest is the rate but for rounding to bytes.
    assert slope * HOUR_NS == pytest.approx(per_hour, abs=7)


def test_the_interval_of_95_percent_holds_the_rate_in_95_of_100_series() -> None:
    rng, inside = random.Random(1), 0
    for _ in range(400):
        _, low, high = theil_sen(line(36, 50 * MIB, rng, 40 * MIB))
        inside += low * HOUR_NS <= 50 * MIB <= high * HOUR_NS
    assert 0.93 <= inside / 400 <= 0.99


def test_noise_without_a_trend_is_called_creep_in_hardly_any_series() -> None:
    rng = random.Random(2)
    called = sum(grown("g", line(48, 0, rng, 100 * MIB), 5 * GIB).creeps for _ in range(400))
    assert called <= 4


def test_ties_do_not_narrow_the_interval_to_a_rate_that_is_not_there() -> None:
    still = grown("g", [(i * EVERY_NS, START + (64 * MIB if i >= 30 else 0)) for i in range(36)], GIB)
    assert not still.creeps


def test_growth_in_steps_by_request_is_recognised() -> None:
    # A report of the field: a tenth of a GB for each multimodal request, some of them an hour.
    points = [(i * EVERY_NS, START + (i // 2) * 102 * MIB) for i in range(72)]
    growth = grown("g", points, 8 * GIB)
    assert growth.creeps
    assert growth.per_hour == pytest.approx(306 * MIB, rel=0.02)
    assert growth.low <= 306 * MIB <= growth.high
    assert (growth.full_ns - growth.at_ns) / HOUR_NS == pytest.approx((8 * GIB - 150 * MIB) / (306 * MIB), rel=0.03)


def test_growth_that_has_ended_is_no_creep() -> None:
    saturated = [(i * EVERY_NS, START + min(i, 20) * 200 * MIB) for i in range(48)]
    assert not grown("g", saturated, 5 * GIB).creeps
    slowing = [(i * EVERY_NS, START + round(2 * GIB * (1 - 0.8**i))) for i in range(60)]
    assert not grown("g", slowing, 5 * GIB).creeps


def test_growth_that_slowed_down_is_told_by_its_later_half() -> None:
    points = [(i * EVERY_NS, START + (i * 100 if i < 30 else 3000 + (i - 30) * 20) * MIB) for i in range(60)]
    assert grown("g", points, 5 * GIB).per_hour == pytest.approx(120 * MIB, rel=0.01)


def device(own: int, name: str = "GPU-0", free: int = 4 * GIB) -> DeviceMemory:
    return DeviceMemory(name, TOTAL, free, GIB, own)


def watched(owns: list[int], name: str = "GPU-0", utilization: int | None = 900) -> CreepWatch:
    watch = CreepWatch()
    for i, own in enumerate(owns):
        for extra in (0, 2, 4):  # between two kept samples there are many more
            at = SETTLING_NS + i * EVERY_NS + extra * 10**9
            watch = watch.sampled(at, 3, 0, (device(own, name),), utilization)
    return watch


def test_a_watch_keeps_one_sample_in_ten_minutes_and_speaks_after_three_hours() -> None:
    owns = [START + i * 50 * MIB for i in range(LEAST)]
    assert watched(owns[:-1]).creep is None
    watch = watched(owns)
    assert len(watch.series["GPU-0"]) == LEAST
    assert watch.creep is not None
    assert watch.creep.per_hour == 300 * MIB
    assert str(watch.creep) == "300 MiB/h (95 %: 300 MiB to 300 MiB)"
    assert len(watched([START + i * MIB for i in range(400)]).series["GPU-0"]) == 144


def test_the_first_half_hour_another_launch_and_a_jump_begin_anew() -> None:
    watch = CreepWatch().sampled(SETTLING_NS - 1, 3, 0, (device(START),), 900)
    assert not watch.series
    watch = watched([START + i * 50 * MIB for i in range(LEAST)])
    later = SETTLING_NS + LEAST * EVERY_NS
    for own in (START // 3, START + 20 * GIB):  # it sleeps; something large was loaded
        jumped = watch.sampled(later, 3, 0, (device(own),), 900)
        assert jumped.creep is None
        assert len(jumped.series["GPU-0"]) == 1
    assert not watch.sampled(later, 4, later, (device(START),), 900).series


def test_a_cpu_engine_that_touches_its_pool_does_not_creep_and_one_beyond_its_request_does() -> None:
    below = watched([TOTAL // 2 + i * 100 * MIB for i in range(LEAST)], HOST)
    assert not below.series
    assert watched([TOTAL * 9 // 10 + GIB + i * 100 * MIB for i in range(LEAST)], HOST).creep is not None


def test_of_several_devices_the_one_that_is_full_first_is_told() -> None:
    watch = CreepWatch()
    for i in range(LEAST):
        devices = (device(START + i * 50 * MIB, "a", 50 * GIB), device(START + i * 20 * MIB, "b", GIB))
        watch = watch.sampled(SETTLING_NS + i * EVERY_NS, 3, 0, devices, 900)
    assert watch.creep is not None
    assert watch.creep.device == "b"


def test_only_a_rate_or_an_end_that_differs_by_a_quarter_is_a_fact_again() -> None:
    told = Growth("g", 100 * HOUR_NS, 100 * MIB, 90 * MIB, 110 * MIB, 5 * HOUR_NS, START, 2 * GIB)
    assert creep_matters(None, told)
    assert creep_matters(told, None)
    assert not creep_matters(None, None)
    later = replace(told, at_ns=told.at_ns + 2 * HOUR_NS, free_bytes=told.free_bytes - 200 * MIB)
    assert not creep_matters(told, later)
    assert creep_matters(told, replace(told, per_hour=130 * MIB))
    assert creep_matters(told, replace(told, free_bytes=told.free_bytes // 2)), "a neighbour took what was free"
