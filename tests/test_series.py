"""The daemon's fifteen minutes: bounded, gaps where nothing is known, and what happened between two pages."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from supervisord_vllm.clock import SECOND_NS, Now
from supervisord_vllm.engine.metrics import EngineLoad
from supervisord_vllm.series import MOST_LAUNCHES, MOST_POINTS, SPAN_S, Series

WALL = 1_796_000_000.0
FIRST = EngineLoad(
    running=16,
    waiting=4,
    kv_usage=0.25,
    preemptions_total=3,
    generation_tokens_total=1000,
    ttft=((1.0, 10), (2.0, 10), (math.inf, 10)),
    inter_token=((0.1, 100), (math.inf, 100)),
)
SECOND = replace(
    FIRST,
    waiting=0,
    preemptions_total=5,
    generation_tokens_total=8340,
    ttft=((1.0, 10), (2.0, 30), (math.inf, 30)),
)


def at(seconds: float) -> int:
    return int(seconds * SECOND_NS)


def told(series: Series, seconds: float) -> dict[str, list[float | None]]:
    document = json.loads(json.dumps(series.document("qwen", Now(at(seconds), WALL)), allow_nan=False))
    columns: dict[str, list[float | None]] = document["points"]
    assert len({len(column) for column in columns.values()}) == 1
    return columns


def test_a_page_after_another_tells_what_happened_between_them() -> None:
    series = Series(5.0)
    series.launched(at(90), 1)
    series.page(at(100), 1, FIRST)
    series.page(at(105), 1, SECOND)
    columns = told(series, 110)
    assert columns["age_s"] == [10.0, 5.0]
    assert columns["waiting"] == [4, 0]
    assert columns["preemptions"] == [None, 2]
    assert columns["tokens_per_s"] == [None, 1468.0]
    assert columns["ttft_p95_s"] == [None, 1.95]
    assert columns["inter_token_p95_s"] == [None, None]  # no token was timed in between: unknown, not nought
    document = series.document("qwen", Now(at(110), WALL))
    assert document["launches"] == [{"number": 1, "age_s": 20.0}]
    assert (document["span_s"], document["every_s"], document["now"]) == (900.0, 5.0, "2026-11-30T00:53:20.000Z")


def test_another_launch_and_a_reset_counter_begin_anew() -> None:
    series = Series(5.0)
    series.page(at(100), 1, SECOND)
    series.launched(at(102), 2)
    series.page(at(105), 2, FIRST)
    series.page(at(110), 2, replace(FIRST, generation_tokens_total=7))
    assert told(series, 110)["preemptions"] == [None, None, None]
    assert told(series, 110)["launch"] == [1, 2, 2]
    assert told(series, 110)["running"] == [16, 16, 16]


def test_what_a_page_does_not_say_is_a_gap() -> None:
    series = Series(5.0)
    series.page(at(100), 1, EngineLoad())
    series.page(at(105), 1, EngineLoad())
    columns = told(series, 110)
    assert {value for name in columns if name not in ("age_s", "launch") for value in columns[name]} == {None}


def test_it_holds_fifteen_minutes_and_no_more_however_fast_pages_come() -> None:
    series = Series(0.05)
    for tick in range(24_000):
        series.page(at(tick * 0.05), 1, replace(FIRST, generation_tokens_total=tick))
        if tick % 100 == 0:
            series.launched(at(tick * 0.05), tick)
    columns = told(series, 1200)
    assert SPAN_S / 1.1 <= len(columns["age_s"]) <= MOST_POINTS
    ages = [age for age in columns["age_s"] if age is not None]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] <= SPAN_S
    assert len(series.document("qwen", Now(at(1200), WALL))["launches"]) == MOST_LAUNCHES
    assert told(series, 3000)["age_s"] == []
