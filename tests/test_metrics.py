"""vLLM's /metrics: captured pages of real engines, old names, several engines, and broken pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord_vllm.engine.metrics import EngineLoad, parse_metrics

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
    assert parse_metrics((CAPTURES / capture).read_text()) == expected


def test_old_names_and_pages_without_engine_labels_are_read() -> None:
    page = (
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\nvllm:num_requests_running 3.0\nvllm:num_requests_swapped 1.0\n'
    )
    assert parse_metrics(page) == EngineLoad(running=3, kv_usage=0.25)
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
    assert parse_metrics(page) == EngineLoad(running=9, kv_usage=0.7, request_success_total=12, kv_cache_tokens=3200)


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


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(["vllm:", "num_requests_running", "cache_config_info", "{", "}", '"', "\\", " ", "1", "\n"])
    )
)
def test_no_page_raises(parts: list[str]) -> None:
    parse_metrics("".join(parts))
