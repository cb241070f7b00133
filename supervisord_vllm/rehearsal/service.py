"""Requests in virtual time: a fluid queue in front of an engine, and the pages of /metrics that it would show.

It is no model of vLLM's scheduler, only of what pressure is about: slots, the KV cache, and a card that computes no
faster with more of either. A step takes the longer, the more sequences it serves; beyond what the KV cache holds,
sequences are preempted and their work is done twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisord_vllm.core.policy import SECOND
from supervisord_vllm.core.pressure import Histogram, Sample
from supervisord_vllm.simulation.card import Timing
from supervisord_vllm.simulation.virtual_scenario import Load

PAGE_S = 5.0
BATCH_HALF = 128
"""Sequences at which a step takes twice as long as with one."""
BOUNDS = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, float("inf"))


@dataclass
class Service:
    """One launch under load. ``slots`` is max_num_seqs, ``kv_tokens`` the size of the KV cache."""

    timing: Timing
    slots: int
    kv_tokens: int
    eager: bool = False
    waiting: float = 0.0
    running: float = 0.0
    preemptions: float = 0.0
    done: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    buckets: dict[float, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))

    def page(self, at_ns: int, load: Load, seconds: float = PAGE_S) -> Sample:
        """Serve for some seconds, then show the page."""
        mean = load.prompt + load.output
        held = max(1.0, self.kv_tokens / mean)
        self.waiting += load.rate * seconds
        self.running = min(float(self.slots), self.running + self.waiting)
        busy = min(self.running, held)
        step = self.timing.token * (1 + busy / BATCH_HALF) * (1.6 if self.eager else 1.0)
        service = load.output * step + self.timing.prefill * load.prompt / 1000
        rate = busy / service
        if self.running > held:
            self.preemptions += (self.running - held) * seconds / service
            rate *= 0.7
        finished = min(rate * seconds, self.waiting)
        self.waiting = max(0.0, self.waiting - finished)
        ttft = self.waiting / rate + self.timing.prefill * load.prompt / 1000 if rate > 0 else 160.0
        for bound in BOUNDS:
            if ttft <= bound:
                self.buckets[bound] += finished
        self.done += finished
        self.prompt_tokens += finished * load.prompt
        self.generation_tokens += finished * load.output
        self.running = min(float(self.slots), load.rate * service + self.waiting)
        histogram: Histogram = tuple((bound, round(count)) for bound, count in self.buckets.items())
        return Sample(
            at_ns,
            round(self.running),
            round(self.waiting),
            min(1.0, self.running / held),
            int(self.preemptions),
            int(self.prompt_tokens),
            int(self.generation_tokens),
            int(self.done),
            ttft=histogram,
        )


def load_at(loads: tuple[Load, ...], at_s: float) -> Load | None:
    """The load at a moment, or ``None`` where nothing is asked."""
    found = [load for load in loads if load.at_s <= at_s]
    return found[-1] if found and found[-1].rate > 0 else None


def nanoseconds(seconds: float) -> int:
    """Virtual seconds as the core counts them."""
    return int(seconds * SECOND)
