"""Progress: when an engine that serves counts as hung, and when a start counts as wedged.

Pure rules over what the shell samples (scrapes of /metrics, answers to a canary, lines, sizes, CPU time). They stand
beside `decide`, not in it: samples are many and would flood the record, so only a verdict becomes a fact (`Stalled`).

*Hung*: nothing came out for `patience` although requests ran or waited in any scrape since, then a request of one token
gets no byte within 30 s, and still nothing came out. Gauges can read 0/0 with a request stuck inside, so an engine that
looks idle is asked every 5 min unless real traffic moves. A failed scrape is no evidence, the first is a baseline.
*Wedged*: no progress of a start for its patience. Equal lines after removing digits are one line (the notice that vLLM
repeats every 60 s is no progress); child CPU alone doubles the patience once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from supervisord_vllm.core.policy import SECOND

CANARY_NS = 30 * SECOND
"""A request of one token that has no byte after this long is a silence."""
IDLE_NS = 300 * SECOND
"""Between two canaries to an engine that looks idle."""
SHORTEST_NS = 60 * SECOND
LONGEST_NS = 300 * SECOND
"""Bounds of a patience that is learnt; the upper one grows with the longest prefill that the engine may have to do."""
DAY_HOURS = 24
_HOUR = 3600 * SECOND
PREFILL_LEAST = 256
"""Prompt tokens between two scrapes from which a prefill rate can be told."""
SHAPES = 4096
"""Distinct lines that are remembered; a start prints some hundreds."""
SHAPE_LENGTH = 200
CPU_SHARE = 20
"""Child CPU counts as work from 1/20 of the patience on."""

Answer = Literal["answered", "refused", "asleep", "silent"]
"""What became of a canary: a token; an HTTP error, as a 503 beside /health 200; sleeping or paused; no byte in time."""

_DIGITS = re.compile(r"[0-9]+")
_COUNT = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Scrape:
    """One page of /metrics: ``work`` is every token and every finished request so far, ``prompts`` the prompt tokens
    among them, ``busy`` the requests that run or wait. ``work`` is ``None`` where the page does not count."""

    at_ns: int
    work: int | None
    prompts: int = 0
    busy: int = 0


@dataclass(frozen=True, slots=True)
class Gaps:
    """The longest gap of each of the last hours that ended well, and the slowest prefill seen (tokens per second)."""

    hours: tuple[tuple[int, int], ...] = ()
    slowest: float | None = None

    def longest_ns(self, now_ns: int) -> int:
        """The longest healthy gap within 24 h."""
        return max((gap for hour, gap in self.hours if hour > now_ns // _HOUR - DAY_HOURS), default=0)

    def with_gap(self, now_ns: int, gap_ns: int, prompts: int) -> Gaps:
        """Also this gap, in which so many prompt tokens were read."""
        hour = now_ns // _HOUR
        kept = {h: gap for h, gap in self.hours if h > hour - DAY_HOURS}
        kept[hour] = max(gap_ns, kept.get(hour, 0))
        slowest = self.slowest
        if prompts >= PREFILL_LEAST and gap_ns > 0:
            rate = prompts * SECOND / gap_ns
            slowest = rate if slowest is None else min(slowest, rate)
        return Gaps(tuple(sorted(kept.items())), slowest)


def patience_ns(fixed_ns: int | None, gaps: Gaps, max_model_len: int | None, now_ns: int) -> int:
    """How long no progress is normal: what the policy says, else three times the longest healthy gap within bounds."""
    if fixed_ns is not None:
        return fixed_ns
    longest = LONGEST_NS
    if gaps.slowest and max_model_len:
        longest = max(longest, int(1.5 * max_model_len / gaps.slowest * SECOND))
    return min(max(3 * gaps.longest_ns(now_ns), SHORTEST_NS), longest)


@dataclass(frozen=True)
class Progress:
    """What is known of one launch's progress since it was healthy. Each method returns the next value.

    ``work`` is the highest count seen: several API servers behind one port may show different pages, and only more
    than ever before is progress. ``rested_ns`` is when it was last known to be well without progress (a canary that
    was answered or refused); ``silent_ns`` when a canary's silence was complete.
    """

    since_ns: int
    fixed_ns: int | None = None
    max_model_len: int | None = None
    gaps: Gaps = Gaps()
    work: int | None = None
    prompts: int = 0
    moved_ns: int | None = None
    rested_ns: int | None = None
    busy: int = 0
    asked_ns: int | None = None
    silent_ns: int | None = None
    confirmed: bool = False

    def patience_ns(self, now_ns: int) -> int:
        """How long no progress is normal now."""
        return patience_ns(self.fixed_ns, self.gaps, self.max_model_len, now_ns)

    def scraped(self, scrape: Scrape) -> Progress:
        """After a page. A page without counts says nothing about progress."""
        if scrape.work is None:
            return self
        if self.work is None:
            return replace(
                self, work=scrape.work, prompts=scrape.prompts, moved_ns=scrape.at_ns, busy=scrape.busy, silent_ns=None
            )
        if scrape.work <= self.work:
            confirmed = self.silent_ns is not None and scrape.at_ns >= self.silent_ns
            return replace(self, busy=max(self.busy, scrape.busy), confirmed=self.confirmed or confirmed)
        gaps = self.gaps
        if self.busy and self.moved_ns is not None:
            gaps = gaps.with_gap(scrape.at_ns, scrape.at_ns - self.moved_ns, scrape.prompts - self.prompts)
        return replace(
            self,
            work=scrape.work,
            prompts=max(self.prompts, scrape.prompts),
            moved_ns=scrape.at_ns,
            busy=scrape.busy,
            gaps=gaps,
            silent_ns=None,
            confirmed=False,
        )

    def quiet_ns(self, now_ns: int) -> int:
        """Since when nothing was heard of it, as a duration."""
        return now_ns - max(self.since_ns, self.moved_ns or 0, self.rested_ns or 0)

    def wants_canary(self, now_ns: int) -> bool:
        """Whether it is time to ask for one token."""
        if self.asked_ns is not None or self.silent_ns is not None:
            return False
        patient = self.patience_ns(now_ns)
        # A patience that an operator made short is meant for idle engines too; a learnt one is not.
        idle = IDLE_NS if self.fixed_ns is None else min(IDLE_NS, max(patient, CANARY_NS))
        return self.quiet_ns(now_ns) >= (patient if self.busy else idle)

    def canary_ns(self, now_ns: int) -> int:
        """How long the canary may be silent. Without counts a full queue cannot be told from a hang but by time."""
        return CANARY_NS if self.work is not None else max(CANARY_NS, self.patience_ns(now_ns))

    def asked(self, now_ns: int) -> Progress:
        """A canary was sent."""
        return replace(self, asked_ns=now_ns)

    def answered(self, now_ns: int, answer: Answer) -> Progress:
        """What became of the canary. Silence is a verdict only if nothing else came out either, by a later page."""
        asked = self.asked_ns if self.asked_ns is not None else now_ns
        after = replace(self, asked_ns=None)
        if answer != "silent":
            return replace(after, rested_ns=now_ns, busy=0)
        if self.moved_ns is not None and self.moved_ns > asked:
            return after  # it moves; our request is only far behind in the queue
        return replace(after, silent_ns=now_ns, confirmed=self.work is None)

    def hung(self, now_ns: int) -> str | None:
        """The verdict, in words, or ``None``."""
        if self.silent_ns is None or not self.confirmed:
            return None
        quiet = self.quiet_ns(now_ns) // SECOND
        waiting = f"although {self.busy} requests ran or waited" if self.busy else "and its gauges show nothing to do"
        what = "no token came out" if self.work is not None else "nothing was heard"
        return f"{what} for {quiet} s {waiting}, and a request of one token got no byte either"


class StartWatch:
    """One start, from spawn to the first healthy answer."""

    def __init__(self, now_ns: int, patience_ns: int) -> None:
        self._patience = patience_ns
        self._since = now_ns
        self._shapes: dict[str, int] = {}
        self._bytes: int | None = None
        self._cpu = 0
        self._cpu_before = 0

    def line(self, now_ns: int, text: str) -> None:
        """A line of output: new in its shape, or with a count that rises (``3/8 shards``)."""
        text = text[:SHAPE_LENGTH]
        shape = _DIGITS.sub("", text)
        counted = "shard" in text or "%|" in text
        found = _COUNT.search(text) if counted else None
        count = int(found[1]) if found else 0
        before = self._shapes.pop(shape, None)
        self._shapes[shape] = max(count, before or 0)
        if len(self._shapes) > SHAPES:
            del self._shapes[next(iter(self._shapes))]
        if before is None or count > before:
            self._moved(now_ns)

    def grew(self, now_ns: int, size_bytes: int) -> None:
        """The size of the caches that a start fills (downloads, compiled code)."""
        if self._bytes is not None and size_bytes > self._bytes:
            self._moved(now_ns)
        self._bytes = size_bytes if self._bytes is None else max(self._bytes, size_bytes)

    def cpu(self, cpu_ns: int) -> None:
        """CPU time of all its processes so far; it may fall when one of them ends."""
        self._cpu = max(self._cpu, cpu_ns)

    def _moved(self, now_ns: int) -> None:
        self._since, self._cpu_before = now_ns, self._cpu

    def quiet_ns(self, now_ns: int) -> int:
        """For how long nothing has moved."""
        return now_ns - self._since

    def wedged(self, now_ns: int) -> str | None:
        """The verdict, in words, or ``None``."""
        quiet = self.quiet_ns(now_ns)
        worked = (self._cpu - self._cpu_before) * CPU_SHARE >= self._patience
        if quiet < (2 if worked else 1) * self._patience:
            return None
        cpu = "though it uses the processor" if worked else "and hardly any processor time"
        return f"no new line of output, no loaded shard and no growth of its caches for {quiet // SECOND} s, {cpu}"
