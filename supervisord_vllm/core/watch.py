"""A watch over one launch while it serves: page after page of /metrics, until something is due to be said.

It stands beside `decide`, as `core.pressure` does, whose rules it applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from supervisord_vllm.core.facts import Verdict
from supervisord_vllm.core.policy import SECOND, Pressure
from supervisord_vllm.core.pressure import (
    ENOUGH_TOKENS,
    NEARLY_ALWAYS,
    WINDOW_NS,
    Episode,
    Measure,
    Sample,
    binding,
    default_targets,
    loss,
    request_tokens,
    sequences_held,
)

LONGEST_S = 60.0
"""What one page can add at most: after a longer silence (the machine slept) nobody knows what was lost."""
QUIET = 1 - NEARLY_ALWAYS
"""With requests waiting on fewer of its pages, a stretch of service shows how fast the engine is when it has room."""
STRETCH_PAGES = 20
"""Pages after which a stretch with more of them waiting is begun anew."""


_OUTPUT = ("generation_tokens", "prompt_tokens", "finished", "first_tokens")


@dataclass(frozen=True)
class Terms:
    """What a watch must know of the launch. ``curable`` are the verdicts that a permitted change may help against, as
    `core.relief.cures` says. ``costs`` is what a restart costs for a verdict where it is not ``cost_s`` (its change
    makes the next start a cold one). ``sequences`` and ``kv_tokens`` are those of all engines behind the page."""

    targets: Pressure
    sequences: int | None = None
    kv_tokens: int | None = None
    cost_s: float = 60.0
    costs: Mapping[Verdict, float] = field(default_factory=dict)
    roll_backs: Mapping[str, int] = field(default_factory=dict)
    curable: frozenset[Verdict] = frozenset({"kv", "slot"})

    def cost(self, verdict: Verdict) -> float:
        """What a restart against it costs, in seconds."""
        return self.costs.get(verdict, self.cost_s)


@dataclass(frozen=True)
class Watch:
    """One launch while it serves: the pages of the last five minutes, the episode, and all of it as one stretch.

    ``episode`` runs while something permitted can help, ``overload`` while nothing can: that is only said. ``slow`` is
    the stretch since slowness began to cost, ``served`` all of it."""

    window: tuple[Sample, ...] = ()
    episode: Episode = field(default_factory=Episode)
    overload: Episode = field(default_factory=Episode)
    loss: float = 0.0
    slow: Measure = field(default_factory=Measure)
    served: Measure = field(default_factory=Measure)
    first: Sample | None = None
    """Where the stretch begins from which a baseline is learnt, with its pages and those of them that had a queue."""
    pages: int = 0
    queued: int = 0
    gap: bool = False
    moves: bool = False
    """Whether anything came out since the page before: an engine from which nothing comes is not slow, and whether it
    hangs is not for pressure to say (`core.progress`)."""

    def missed(self) -> Watch:
        """After a page that could not be read: the next one adds nothing."""
        return replace(self, gap=True)

    def scraped(self, sample: Sample, terms: Terms) -> Watch:
        """After a page. The first is a baseline; a page that counts less than before is one (the engine restarted)."""
        last = self.window[-1] if self.window else None
        if last is None or sample.first_tokens < last.first_tokens or sample.at_ns <= last.at_ns:
            return Watch((sample,), first=sample)
        moves = any(getattr(sample, name) > getattr(last, name) for name in _OUTPUT)
        window = (*(s for s in self.window if s.at_ns > sample.at_ns - WINDOW_NS), sample)
        lost = loss(terms.targets, last, sample)
        verdict = binding(window, terms.sequences)
        passed = (sample.at_ns - last.at_ns) / SECOND
        seconds = 0.0 if self.gap else min(passed, LONGEST_S)
        cost, now, curable = terms.cost(verdict), sample.at_ns, verdict in terms.curable
        page = Measure(passed, sample.first_tokens - last.first_tokens, lost * passed, sample.arrived - last.arrived)
        episode = self.episode.after(verdict, lost, seconds, now, cost, curable=curable)
        overload = self.overload.after(verdict, lost, seconds, now, cost, curable=not curable)
        begun = max(episode.lost_s, overload.lost_s) > 0
        slow = (self.slow if self.lost_s() > 0 else Measure()).and_then(page) if begun else Measure()
        watch = Watch(window, episode, overload, lost, slow, self.served.and_then(page), moves=moves)
        pages, queued = self.pages + 1, self.queued + (sample.waiting > 0)
        if pages >= STRETCH_PAGES and queued >= QUIET * pages:
            return replace(watch, first=sample)
        return replace(watch, first=self.first or sample, pages=pages, queued=queued)

    def due(self, terms: Terms) -> Verdict | None:
        """What it is time to say (`core.facts.Pressed`): a verdict that a restart pays for by now, or one that nothing
        permitted can help against and that has cost as much."""
        if not self.moves:
            return None
        for episode, roll_backs in ((self.episode, terms.roll_backs), (self.overload, {})):
            verdict = episode.verdict
            if verdict is not None and episode.due(terms.cost(verdict), roll_backs.get(verdict, 0)):
                return verdict
        return None

    def lost_s(self) -> float:
        """Outage-equivalent seconds of what goes on now."""
        return max(self.episode.lost_s, self.overload.lost_s)

    def sequences(self, terms: Terms) -> int | None:
        """How many of the requests seen the KV cache holds at once."""
        return sequences_held(terms.kv_tokens, request_tokens(self.window))

    def baseline(self, declared: Pressure) -> Pressure | None:
        """The targets that this service teaches, once enough requests were served without a queue."""
        if self.first is None or not self.window or self.queued >= QUIET * max(1, self.pages):
            return None
        last = self.window[-1]
        if last.first_tokens - self.first.first_tokens < ENOUGH_TOKENS:
            return None
        return default_targets(declared, self.first, last)
