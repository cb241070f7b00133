"""Speed of reading /metrics: only what is needed against prometheus-client's full parser, on a real page.

``python benchmarks/metrics.py``. The page is one of vLLM 0.26.0 (46 KB, 577 lines, 86 families). Processor time of one
core, the best of several rounds, so that a busy machine shows the same ratio. Never a gate: figures of one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from supervisord_vllm.engine.metrics import between, parse_metrics

PAGE = Path(__file__).parent.parent / "tests/data/captures/h200-vllm-0.26.0/30-pressure-u135-s256.metrics"
ROUNDS, EACH = 10, 20


def best(work: Callable[[], object]) -> float:
    """Seconds of one call, the best round."""
    found = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(EACH):
            work()
        found.append((time.thread_time() - began) / EACH)
    return min(found)


def main() -> None:
    """Print both figures and their ratio."""
    page = PAGE.read_text(encoding="utf-8")
    full = best(lambda: [sample for family in text_string_to_metric_families(page) for sample in family.samples])
    needed = best(lambda: parse_metrics(page))
    load = parse_metrics(page)
    interval = best(lambda: between(load, load, 5.0))
    print(f"page of {len(page):,} bytes, {page.count(chr(10))} lines")
    print(f"  prometheus-client, everything {full * 1e3:8.3f} ms")
    print(f"  needed families only          {needed * 1e3:8.3f} ms, 1/{full / needed:.0f} of it")
    print(f"  quantiles between two pages   {interval * 1e3:8.3f} ms")


if __name__ == "__main__":
    main()
