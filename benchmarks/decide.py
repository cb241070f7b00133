"""Speed of the core: one `decide`, and one simulated day. ``python benchmarks/decide.py``

Goals (issue "Deciding"): `decide` below 50 µs, a simulated day below 0.5 s. Never a gate: figures of one machine.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import simulated_days

from supervisord_vllm.core.facts import Fact
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.state import State
from supervisord_vllm.rehearsal import play as playing

DAYS = 100


def main() -> None:
    """Print both figures."""
    seen: list[tuple[object, State, Fact]] = []
    original = playing.decide

    def noting(policy: object, state: State, fact: Fact) -> object:
        seen.append((policy, state, fact))
        return original(policy, state, fact)  # type: ignore[arg-type]  # passed through as it came

    days = []
    for seed in range(DAYS):
        began = time.perf_counter()
        simulated_days.day(seed)
        days.append(time.perf_counter() - began)
    playing.decide = noting  # type: ignore[assignment]
    for seed in range(DAYS):
        simulated_days.day(seed)
    playing.decide = original
    random.Random(1).shuffle(seen)
    times = []
    for policy, state, fact in seen:
        began = time.perf_counter()
        decide(policy, state, fact)  # type: ignore[arg-type]  # as recorded
        times.append(time.perf_counter() - began)
    times.sort()
    print(f"decide: {len(times)} facts of {DAYS} days")
    print(f"  mean   {statistics.mean(times) * 1e6:7.1f} µs")
    print(f"  median {statistics.median(times) * 1e6:7.1f} µs")
    print(f"  p99    {times[int(len(times) * 0.99)] * 1e6:7.1f} µs")
    print(f"a simulated day: mean {statistics.mean(days):.3f} s, longest {max(days):.3f} s")


if __name__ == "__main__":
    main()
