"""Requests in virtual time: a fluid queue in front of an engine, and the pages of /metrics that it would show.

It is no model of vLLM's scheduler, only of what pressure is about: slots, the KV cache, and a card that computes no
faster with more of either. A step takes the longer, the more sequences it serves; beyond what the KV cache holds,
sequences are preempted and their work is done twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisord_vllm.core.pressure import Histogram, Sample
from supervisord_vllm.simulation.card import Timing
from supervisord_vllm.simulation.virtual_scenario import Load

PAGE_S = 5.0
BATCH_HALF = 128
"""Sequences at which a step takes twice as long as with one."""
BOUNDS = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, float("inf"))
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, float("inf"))


@dataclass
class Service:
    """One launch under load. ``slots`` is max_num_seqs, ``kv_tokens`` the size of the KV cache.

    ``inside`` are the requests in the engine: as many as the slots and the KV cache permit are served, the others wait.
    """

    timing: Timing
    slots: int
    kv_tokens: int
    eager: bool = False
    inside: float = 0.0
    preemptions: float = 0.0
    done: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    buckets: dict[float, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))
    between: dict[float, float] = field(default_factory=lambda: dict.fromkeys(BETWEEN, 0.0))

    def page(self, at_ns: int, load: Load | None, seconds: float = PAGE_S) -> Sample:
        """Serve for some seconds, then show the page. ``None``: no request comes."""
        rate, prompt, output = (load.rate, load.prompt, load.output) if load is not None else (0.0, 1, 1)
        held = max(1.0, self.kv_tokens / (prompt + output))
        room = min(float(self.slots), held)
        work = self.inside + rate * seconds
        alone = self._seconds(1, prompt, output)
        # What runs at once follows Little's law while there is room, and fills it as soon as more comes than goes.
        busy = min(room, max(self.inside, rate * alone, 1e-9))
        for _ in range(8):
            busy = min(room, max(self.inside, rate * self._seconds(busy, prompt, output), 1e-9))
        service = self._seconds(busy, prompt, output)
        pace = busy / service
        crowded = self.inside > busy and held < self.slots
        if crowded:
            self.preemptions += max(1.0, (min(self.inside, self.slots) - busy) * seconds / service)
            pace *= 0.7
        finished = min(pace * seconds, max(0.0, work - min(busy, rate * service)))
        self.inside = work - finished
        waits = max(0.0, self.inside - busy)
        self._observe(finished, waits / pace + self.timing.prefill * prompt / 1000, finished * output, service / output)
        self.done += finished
        self.prompt_tokens += finished * prompt
        self.generation_tokens += finished * output
        running = min(self.inside, busy)
        return Sample(
            at_ns,
            round(running),
            round(waits),
            min(1.0, running / held),
            int(self.preemptions),
            int(self.prompt_tokens),
            int(self.generation_tokens),
            int(self.done),
            ttft=_histogram(self.buckets),
            inter_token=_histogram(self.between),
        )

    @property
    def drained_s(self) -> float:
        """How long what is inside takes, if nothing more comes and it is served at the pace of one after another."""
        return max(1.0, self.inside * self.timing.token)

    def _seconds(self, busy: float, prompt: int, output: int) -> float:
        """How long one request is served beside others."""
        step = self.timing.token * (1 + busy / BATCH_HALF) * (1.6 if self.eager else 1.0)
        return output * step + self.timing.prefill * prompt / 1000

    def _observe(self, requests: float, first_s: float, tokens: float, between_s: float) -> None:
        for buckets, count, seconds in ((self.buckets, requests, first_s), (self.between, tokens, between_s)):
            for bound in buckets:
                if seconds <= bound:
                    buckets[bound] += count


def _histogram(buckets: dict[float, float]) -> Histogram:
    return tuple((bound, round(count)) for bound, count in buckets.items())


def load_at(loads: tuple[Load, ...], at_s: float) -> Load | None:
    """The load at a moment, or ``None`` where nothing is asked."""
    found = [load for load in loads if load.at_s <= at_s]
    return found[-1] if found and found[-1].rate > 0 else None


def next_load(loads: tuple[Load, ...], after_s: float) -> float | None:
    """When the load changes next."""
    return min((load.at_s for load in loads if load.at_s > after_s), default=None)
