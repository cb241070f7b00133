"""Pressure: when an engine that serves too slowly is worth a restart. Pure functions of windows of samples.

*What is lost.* x is the share of new observations above a target (linear within the histogram's bucket); where requests
wait and none got a first token, x is 1. The loss is the largest (x - 0.05)+ / 0.95 of all targets, and S, its sum over
time, counts outage-equivalent seconds; a page that was not read adds nothing. *When*: ski rental. A restart costs C; it
is worth it once S >= 2^k * C, with k the changes of this kind that were taken back since the last that helped. So what
is lost is never more than 1 + 2^k times what the best choice in hindsight would have lost.

*Which resource binds.* KV cache: preemptions rise, or requests wait although slots are free and the cache is full. A
full cache alone says nothing: that is prefix caching. Slots: nearly always as many run as may, others wait, and the
cache has room. Else the card itself.

They stand beside `decide`, not in it: samples are many and would flood the record, so only a verdict becomes a fact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from supervisord_vllm.core.facts import Verdict
from supervisord_vllm.core.policy import SECOND, Pressure

TOLERATED = 0.05
"""A target is a 95th percentile: so many may be late."""
CALM_NS = 600 * SECOND
"""An episode ends after so long without loss, or twice the cost of a restart if that is longer."""
WINDOW_NS = 300 * SECOND
FULL = 0.95
ROOMY = 0.9
NEARLY_ALWAYS = 0.8
ENOUGH_TOKENS = 200
"""First tokens after which a change can be judged."""
ALIKE = 0.25
"""Arrivals within this share of before are the same load."""
FELL = 0.05
"""A loss that is lower by less than this did not fall: pages of the same service differ by as much."""
PATIENT_S = 1800.0
"""A change that could not be judged within this is kept."""

Histogram = tuple[tuple[float, int], ...]
"""Upper bounds in seconds (the last infinite) with cumulative counts, as Prometheus has them."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One page of /metrics; counters since the engine's start. ``kv_usage`` is 0 to 1."""

    at_ns: int
    running: int
    waiting: int
    kv_usage: float | None = None
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    ttft: Histogram = ()
    inter_token: Histogram = ()
    queue: Histogram = ()

    @property
    def first_tokens(self) -> int:
        """Requests that got their first token."""
        return self.ttft[-1][1] if self.ttft else 0

    @property
    def arrived(self) -> int:
        """Requests that came: each is finished, runs or waits. From the engine's start on."""
        return self.finished + self.running + self.waiting


def late_share(before: Histogram, after: Histogram, target_s: float) -> float | None:
    """Share of the observations between two pages that took longer than the target; ``None`` where there were none."""
    earlier = dict(before)
    new = [(bound, count - earlier.get(bound, 0)) for bound, count in after]
    total = new[-1][1] if new else 0
    if total <= 0:
        return None
    low, under = 0.0, 0
    for bound, count in new:
        if target_s <= bound:
            inside = count - under
            part = 1.0 if bound == low else (target_s - low) / (bound - low) if bound != float("inf") else 0.0
            return 1 - (under + inside * part) / total
        low, under = bound, count
    return 0.0


def quantile(before: Histogram, after: Histogram, share: float) -> float | None:
    """The value below which ``share`` of the new observations lie, linear within the bucket."""
    earlier = dict(before)
    new = [(bound, count - earlier.get(bound, 0)) for bound, count in after]
    total = new[-1][1] if new else 0
    if total <= 0:
        return None
    low, under = 0.0, 0
    for bound, count in new:
        if count >= share * total:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (share * total - under) / max(1, count - under)
        low, under = bound, count
    return low


def loss(targets: Pressure, before: Sample, after: Sample) -> float:
    """The share of the service that is lost between two pages, 0 to 1: that of the worst target."""
    worst = 0.0
    for target_ns, name in (
        (targets.ttft_ns, "ttft"),
        (targets.inter_token_ns, "inter_token"),
        (targets.queue_ns, "queue"),
    ):
        if target_ns is None:
            continue
        late = late_share(getattr(before, name), getattr(after, name), target_ns / SECOND)
        if late is None:
            late = 1.0 if after.waiting > 0 and after.first_tokens == before.first_tokens else 0.0
        worst = max(worst, (late - TOLERATED) / (1 - TOLERATED))
    return worst


def binding(window: Sequence[Sample], sequences: int | None) -> Verdict:
    """Which resource binds, over a window of pages."""
    queued = [sample for sample in window if sample.waiting > 0]
    if len(window) < 2 or not queued:
        return "compute"
    usage = max((sample.kv_usage for sample in queued if sample.kv_usage is not None), default=None)
    if window[-1].preemptions > window[0].preemptions:
        return "kv"
    if sequences is None:
        return "compute"
    full = [s for s in queued if s.running < sequences and s.kv_usage is not None and s.kv_usage >= FULL]
    if len(full) >= NEARLY_ALWAYS * len(queued):
        return "kv"
    slots = [sample for sample in queued if sample.running >= sequences]
    if len(slots) >= NEARLY_ALWAYS * len(queued) and (usage is None or usage < ROOMY):
        return "slot"
    return "compute"


def request_tokens(window: Sequence[Sample]) -> float | None:
    """Mean tokens (prompt and output) of the requests that finished in a window."""
    if len(window) < 2:
        return None
    first, last = window[0], window[-1]
    finished = last.finished - first.finished
    tokens = last.prompt_tokens + last.generation_tokens - first.prompt_tokens - first.generation_tokens
    return tokens / finished if finished > 0 and tokens > 0 else None


def sequences_held(kv_tokens: int | None, mean_tokens: float | None) -> int | None:
    """S*: how many such requests the KV cache holds at once (H200: 60,128 tokens / 814 = 73)."""
    return int(kv_tokens // mean_tokens) if kv_tokens and mean_tokens else None


def restart_cost_s(own: Iterable[float], first_guess_s: float) -> float:
    """C: the median of our own restarts (stop, start and canary), before any of them a first guess."""
    durations = [seconds for seconds in own if seconds > 0]
    return median(durations) if durations else first_guess_s


def default_targets(declared: Pressure, before: Sample, after: Sample) -> Pressure:
    """Targets where none is declared: twice the 95th percentile of what was proven at the declared levers."""
    if (declared.ttft_ns, declared.inter_token_ns, declared.queue_ns) != (None, None, None):
        return declared

    def twice(name: str) -> int | None:
        found = quantile(getattr(before, name), getattr(after, name), 0.95)
        return int(2 * found * SECOND) if found else None

    return replace(declared, ttft_ns=twice("ttft"), inter_token_ns=twice("inter_token"), queue_ns=twice("queue"))


@dataclass(frozen=True, slots=True)
class Episode:
    """What slowness has cost while one resource was binding. ``calm_ns`` is since when nothing is lost."""

    verdict: Verdict | None = None
    lost_s: float = 0.0
    calm_ns: int | None = None

    def after(
        self, verdict: Verdict, lost: float, seconds: float, now_ns: int, cost_s: float, *, curable: bool
    ) -> Episode:
        """Some more seconds of it. Another verdict, an incurable one or a long calm begin anew."""
        if not curable:
            return Episode(verdict)
        if lost < TOLERATED:
            calm = now_ns if self.calm_ns is None else self.calm_ns
            over = now_ns - calm >= max(int(2 * cost_s * SECOND), CALM_NS)
            return Episode(self.verdict, 0.0 if over else self.lost_s + lost * seconds, calm)
        before = self.lost_s if verdict == self.verdict else 0.0
        return Episode(verdict, before + lost * seconds)

    def due(self, cost_s: float, roll_backs: int) -> bool:
        """Whether a restart pays by now."""
        return self.verdict is not None and self.lost_s >= 2**roll_backs * cost_s


@dataclass(frozen=True, slots=True)
class Measure:
    """A stretch of service: how long, how many first tokens, how much was lost, how many requests came (``None``:
    taken to be as many as got a first token)."""

    seconds: float = 0.0
    first_tokens: int = 0
    lost_s: float = 0.0
    arrived: int | None = None

    def and_then(self, more: Measure) -> Measure:
        """Both stretches, one after the other."""
        return Measure(
            self.seconds + more.seconds,
            self.first_tokens + more.first_tokens,
            self.lost_s + more.lost_s,
            (self.arrived or 0) + (more.first_tokens if more.arrived is None else more.arrived),
        )

    @property
    def loss(self) -> float:
        """The mean loss, 0 to 1."""
        return self.lost_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def arrivals(self) -> float:
        """Requests a second."""
        arrived = self.first_tokens if self.arrived is None else self.arrived
        return arrived / self.seconds if self.seconds > 0 else 0.0


def measure(targets: Pressure, samples: Sequence[Sample]) -> Measure:
    """A stretch of service from its pages."""
    if len(samples) < 2:
        return Measure()
    lost = sum(loss(targets, a, b) * (b.at_ns - a.at_ns) / SECOND for a, b in pairwise(samples))
    first, last = samples[0], samples[-1]
    seconds = (last.at_ns - first.at_ns) / SECOND
    return Measure(seconds, last.first_tokens - first.first_tokens, lost, last.arrived - first.arrived)


def verdict_on(before: Measure, after: Measure) -> Literal["keep", "roll-back"] | None:
    """What a change brought, once that can be told: taken back only if the loss did not fall under a like load."""
    alike = before.arrivals > 0 and abs(after.arrivals / before.arrivals - 1) <= ALIKE
    if after.first_tokens >= ENOUGH_TOKENS and alike:
        return "roll-back" if after.loss > before.loss - FELL else "keep"
    return "keep" if after.seconds >= PATIENT_S else None
