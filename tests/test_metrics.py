"""vLLM's /metrics: captured pages of real engines, old names, several engines, broken pages, and what happened
between two of them; the numbers are those of prometheus-client's own parser."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from supervisord_vllm.engine.metrics import MOST_BOUNDS, EngineLoad, between, parse_metrics, was_reset

CAPTURES = Path(__file__).parent / "data" / "captures"


@pytest.mark.parametrize(
    ("capture", "expected"),
    [
        ("cpu-vllm-0.32.0/metrics-busy.txt", EngineLoad(4, 0, 0.007827788649706457, 0, 30, 123, 3, 65536, False)),
        ("cpu-vllm-0.32.0/metrics-after.txt", EngineLoad(0, 0, 0.0, 0, 30, 420, 7, 65536, False)),
        ("cpu-vllm-0.32.0/metrics-queueing.txt", EngineLoad(10, 30, 0.967741935483871, 0, 679, 668, 1, 1024, False)),
        (
            "h200-vllm-0.26.0/30-pressure-u135-s256.metrics",
            EngineLoad(0, 0, 0.0, 147, 205_600, 120_000, 400, 60128, False),
        ),
    ],
)
def test_pages_of_real_engines_are_read(capture: str, expected: EngineLoad) -> None:
    read = parse_metrics((CAPTURES / capture).read_text())
    assert replace(read, engines=None, longest_request=None, ttft=(), inter_token=(), queue=()) == expected
    assert read.engines == 1
    assert read.first_tokens_total is not None
    assert read.inter_token


def test_old_names_and_pages_without_engine_labels_are_read() -> None:
    page = (
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\nvllm:num_requests_running 3.0\nvllm:num_requests_swapped 1.0\n'
    )
    assert parse_metrics(page) == EngineLoad(running=3, kv_usage=0.25, engines=1)
    both = page + 'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    assert parse_metrics(both).kv_usage == 0.5


def test_engines_are_summed_and_the_fullest_cache_counts() -> None:
    page = "".join(
        f'vllm:num_requests_running{{engine="{engine}",model_name="m"}} {running}.0\n'
        f'vllm:kv_cache_usage_perc{{engine="{engine}"}} 0.{running}\n'
        f'vllm:request_success_total{{engine="{engine}",finished_reason="stop"}} 5.0\n'
        f'vllm:request_success_total{{engine="{engine}",finished_reason="abort"}} 1e0\n'
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="100",engine="{engine}"}} 1.0\n'
        for engine, running in enumerate((2, 7))
    )
    assert parse_metrics(page) == EngineLoad(
        running=9, kv_usage=0.7, request_success_total=12, kv_cache_tokens=3200, engines=2
    )


def test_labels_may_hold_anything() -> None:
    page = 'vllm:num_requests_waiting{model_name="a } 9 \\" {",engine="0"} 4.0 1796088736000\n'
    assert parse_metrics(page).waiting == 4
    assert parse_metrics('vllm:num_requests_waiting{model_name="a } 9') == EngineLoad()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "", "x", "1e9999", "1_0", "0x10"])
def test_a_value_that_is_no_finite_number_is_absent(value: str) -> None:
    load = parse_metrics(f"vllm:num_requests_running {value}\n")
    assert load == EngineLoad()
    assert not load.known
    assert EngineLoad(running=0).known


def test_histograms_keep_the_pages_own_bounds_and_are_summed_over_engines() -> None:
    page = "".join(
        f'vllm:time_to_first_token_seconds_bucket{{engine="{engine}",le="{bound}",model_name="m,le=\\"9\\""}} {count}\n'
        for engine in (0, 1)
        for bound, count in (("0.3", 1), ("1e1", 4), ("+Inf", 5))
    )
    assert parse_metrics(page).ttft == ((0.3, 2), (10.0, 8), (float("inf"), 10))
    assert parse_metrics(page).first_tokens_total == 10


def test_the_longest_request_is_bounded_by_the_highest_buckets_that_hold_any() -> None:
    """Capture 30: prompts of 514 tokens and 300 tokens of output lie in the buckets up to 1,000 and 500."""
    page = (CAPTURES / "h200-vllm-0.26.0/30-pressure-u135-s256.metrics").read_text()
    assert parse_metrics(page).longest_request == 1500
    assert parse_metrics('vllm:request_prompt_tokens_bucket{le="+Inf"} 3.0\n').longest_request is None


def test_a_histogram_without_its_infinite_bound_is_none() -> None:
    assert parse_metrics('vllm:time_to_first_token_seconds_bucket{le="0.3"} 1.0\n') == EngineLoad()


def test_of_two_names_of_one_histogram_the_newer_counts() -> None:
    old = (
        'vllm:time_per_output_token_seconds_bucket{le="+Inf"} 7.0\nvllm:time_in_queue_requests_bucket{le="+Inf"} 2.0\n'
    )
    assert (parse_metrics(old).inter_token, parse_metrics(old).queue) == (((float("inf"), 7),), ((float("inf"), 2),))
    both = old + 'vllm:inter_token_latency_seconds_bucket{le="+Inf"} 9.0\n'
    assert parse_metrics(both).inter_token == ((float("inf"), 9),)
    other = 'vllm:request_time_per_output_token_seconds_bucket{le="+Inf"} 9.0\n'
    assert parse_metrics(other).inter_token == (), "one observation a request, not one a token"


def test_what_happened_between_two_pages() -> None:
    idle, after = (
        parse_metrics((CAPTURES / name).read_text())
        for name in ("cpu-vllm-0.32.0/metrics-busy.txt", "cpu-vllm-0.32.0/metrics-after.txt")
    )
    found = between(idle, after, 5.0)
    assert found is not None
    assert (found.running, found.waiting, found.preemptions, found.finished) == (0, 0, 0, 4)
    assert found.generation_tokens == 297
    assert found.rate(found.generation_tokens) == 59.4
    assert found.inter_token_p95 is not None
    assert found.ttft_p95 is None, "all of them had their first token before"


def test_the_quantiles_of_a_capture_are_those_that_its_clients_measured() -> None:
    """Capture 30: the clients saw a first token after 7.8 s (p50) and 16.3 s (p95); buckets end at 7.5, 10 and 20."""
    page = parse_metrics((CAPTURES / "h200-vllm-0.26.0/30-pressure-u135-s256.metrics").read_text())
    found = between(EngineLoad(), page, 41.6)
    assert found is not None
    assert found.ttft_p50 == pytest.approx(7.837, rel=0.05)
    assert found.ttft_p95 == pytest.approx(16.335, rel=0.15)
    assert found.preemptions is None, "an unknown counter has no difference"


def test_counters_that_count_less_are_another_engines() -> None:
    before = EngineLoad(generation_tokens_total=9, ttft=((float("inf"), 3),))
    assert was_reset(before, EngineLoad(generation_tokens_total=2))
    assert was_reset(before, EngineLoad(ttft=((float("inf"), 0),)))
    assert not was_reset(before, EngineLoad())
    assert between(before, EngineLoad(generation_tokens_total=2), 5.0) is None


def test_the_status_document_shows_numbers_and_no_histograms() -> None:
    page = parse_metrics((CAPTURES / "cpu-vllm-0.32.0/metrics-busy.txt").read_text())
    shown = page.to_json()
    assert shown["running"] == 4
    assert not {"ttft", "inter_token", "queue"} & shown.keys()


def test_a_flood_of_buckets_or_labels_is_bounded_and_linear() -> None:
    flood = "".join(f'vllm:time_to_first_token_seconds_bucket{{le="{n}.5"}} 1.0\n' for n in range(20_000))
    page = 'vllm:time_to_first_token_seconds_bucket{le="+Inf"} 1.0\n' + flood
    assert len(parse_metrics(page).ttft) == MOST_BOUNDS
    hostile = 'vllm:cache_config_info{a="' + '\\"},le="' * 100_000
    began = time.process_time()
    assert not parse_metrics(hostile).known
    assert time.process_time() - began < 2, "a megabyte, linear: tens of milliseconds"


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(
            (
                *(
                    "vllm:",
                    "num_requests_running",
                    "cache_config_info",
                    "{",
                    "}",
                    '"',
                    "\\",
                    " ",
                    "1",
                    "\n",
                    "le=",
                    ",",
                ),
                *("time_to_first_token_seconds_bucket", "+Inf", 'engine="0"'),
            )
        )
    )
)
def test_no_page_raises(parts: list[str]) -> None:
    parse_metrics("".join(parts))


NUMBERS = st.integers(0, 10**9) | st.floats(0, 1e9, allow_nan=False)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=12)
TIMES = st.lists(st.floats(0, 100, allow_nan=False), max_size=12)
BOUNDS = st.lists(st.floats(0.001, 60), min_size=1, max_size=8, unique=True).map(sorted)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.dictionaries(NAMES, st.tuples(NUMBERS, NUMBERS, st.floats(0, 1), TIMES, TIMES), max_size=3), BOUNDS)
def test_every_number_is_the_one_that_prometheus_clients_parser_reads(
    engines: dict[str, tuple[float, float, float, list[float], list[float]]], bounds: list[float]
) -> None:
    """Any engines, any label text, any observations, any buckets."""
    registry, labels = CollectorRegistry(), ["model_name", "engine"]
    running = Gauge("vllm:num_requests_running", "Text.", labels, registry=registry)
    usage = Gauge("vllm:kv_cache_usage_perc", "Text.", labels, registry=registry)
    tokens = Counter("vllm:generation_tokens", "Text.", labels, registry=registry)
    first = Histogram("vllm:time_to_first_token_seconds", "Text.", labels, registry=registry, buckets=bounds)
    between_tokens = Histogram("vllm:inter_token_latency_seconds", "Text.", labels, registry=registry)
    for name, (now, count, share, firsts, times) in engines.items():
        running.labels(name, "0").set(now)
        tokens.labels(name, "0").inc(count)
        usage.labels(name, "0").set(share)
        for seconds in firsts:
            first.labels(name, "0").observe(seconds)
        for seconds in times:
            between_tokens.labels(name, "0").observe(seconds)
    page = generate_latest(registry).decode()
    theirs: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            theirs[sample.name].append((sample.labels, sample.value))

    def buckets(name: str) -> tuple[tuple[float, int], ...]:
        found: dict[float, float] = defaultdict(float)
        for labels, value in theirs[f"{name}_bucket"]:
            found[float(labels["le"])] += value
        return tuple((bound, round(found[bound])) for bound in sorted(found))

    ours = parse_metrics(page)
    assert ours.ttft == buckets("vllm:time_to_first_token_seconds")
    assert ours.inter_token == buckets("vllm:inter_token_latency_seconds")
    assert ours.running == (round(sum(v for _, v in theirs["vllm:num_requests_running"])) if engines else None)
    assert ours.generation_tokens_total == (
        round(sum(v for _, v in theirs["vllm:generation_tokens_total"])) if engines else None
    )
    assert ours.kv_usage == max((v for _, v in theirs["vllm:kv_cache_usage_perc"]), default=None)
