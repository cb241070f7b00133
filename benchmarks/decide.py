"""Speed of the core: one `decide`, and one simulated day. ``python benchmarks/decide.py``

Goals (issue "Deciding"): `decide` below 50 µs, a simulated day below 0.5 s. Processor time, so that a busy machine
shows the same. Never a gate: figures of one machine.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from simulated_days import day, policy_of, scenario_of
from supervisord_vllm.core.facts import Fact
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.state import State
from supervisord_vllm.rehearsal.play import Play

DAYS = 100


@dataclass
class Noted(Play):
    """A play that notes what `decide` was asked."""

    asked: list[tuple[State, Fact]] = field(default_factory=list)

    def _step(self, fact: Fact) -> None:
        self.asked.append((self.state, fact))
        super()._step(fact)


def main() -> None:
    """Print both figures."""
    days, times = [], []
    for seed in range(DAYS):
        began = time.perf_counter()
        day(seed)
        days.append(time.perf_counter() - began)
        rng = random.Random(seed)  # noqa: S311 - a reproducible draw, no secret
        noted = Noted(policy_of(rng), scenario_of(rng, seed))
        noted.run()
        for state, fact in noted.asked:
            began = time.thread_time()
            decide(noted.policy, state, fact)
            times.append(time.thread_time() - began)
    times.sort()
    print(f"decide: {len(times)} facts of {DAYS} days")
    print(f"  mean   {statistics.mean(times) * 1e6:7.1f} µs")
    print(f"  median {statistics.median(times) * 1e6:7.1f} µs")
    print(f"  p99    {times[int(len(times) * 0.99)] * 1e6:7.1f} µs")
    print(f"a simulated day: mean {statistics.mean(days):.3f} s, longest {max(days):.3f} s")


if __name__ == "__main__":
    main()
