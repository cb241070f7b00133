"""The vigil over one living engine: samples for the rules of `core.progress`, and their verdict as one fact.

Until the first healthy answer it watches the start (lines, caches, processor time), after that what /metrics counts
and, where nothing moves, whether one token still comes. High-volume samples end here; only a verdict (`Stalled`) is
posted, once. It must be cancelled before a stop signal is sent: a stopping engine may be silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from supervisord_vllm.clock import SECOND_NS, boottime_ns
from supervisord_vllm.core.facts import Fact, Stalled
from supervisord_vllm.core.progress import Gaps, Progress, Scrape, StartWatch
from supervisord_vllm.engine.metrics import EngineLoad
from supervisord_vllm.engine.probe import EngineClient, Served
from supervisord_vllm.host.leftovers import size_bytes
from supervisord_vllm.host.procfs import cpu_ns

LOOK_S = 1.0
"""Between two looks at a start, and at most between two decisions about a canary."""
QUIET_SHARE = 4
"""Caches and processor time are looked at once a quarter of the patience has passed without a line."""


@dataclass(frozen=True)
class Terms:
    """What the vigil is told: ``start_ns`` and ``hang_ns`` are the patience of a start and of a serving engine
    (``None``: learnt), ``gaps`` what was learnt from earlier launches, ``caches`` the folders that a start fills."""

    launch: int
    served: Served
    start_ns: int
    hang_ns: int | None = None
    max_model_len: int | None = None
    gaps: Gaps = field(default_factory=Gaps)
    caches: tuple[Path, ...] = ()
    headless: bool = False


class Vigil:
    """One launch's vigil. `line` and `loaded` are fed by the launch; `watch` runs as a task of its own."""

    def __init__(
        self, terms: Terms, client: EngineClient, post: Callable[[Fact], None], own_pids: Callable[[], frozenset[int]]
    ) -> None:
        self._terms = terms
        self._client = client
        self._post = post
        self._own_pids = own_pids
        self._start: StartWatch | None = StartWatch(boottime_ns(), terms.start_ns)
        self._progress = Progress(boottime_ns(), terms.hang_ns, terms.max_model_len, terms.gaps)
        self._told = False

    @property
    def gaps(self) -> Gaps:
        """What was learnt of healthy gaps, for the next launch."""
        return self._progress.gaps

    def line(self, line: bytes) -> None:
        """A line of output; only a start is judged by it."""
        if self._start is not None:
            self._start.line(boottime_ns(), line[:400].decode("utf-8", "replace"))

    def healthy(self, max_model_len: int | None) -> None:
        """The first healthy answer: the start is over. ``max_model_len`` is what the log says, if it does."""
        if self._start is not None:
            self._start = None
            length = self._terms.max_model_len or max_model_len
            self._progress = Progress(boottime_ns(), self._terms.hang_ns, length, self._terms.gaps)

    def loaded(self, load: EngineLoad) -> None:
        """A page of /metrics."""
        now = boottime_ns()
        counts = (load.prompt_tokens_total, load.generation_tokens_total, load.request_success_total)
        known = [count for count in counts if count is not None]
        busy = (load.running or 0) + (load.waiting or 0)
        work = sum(known) if known else None
        self._progress = self._progress.scraped(Scrape(now, work, load.prompt_tokens_total or 0, busy))
        if load.asleep:
            self._progress = self._progress.answered(now, "asleep")

    async def watch(self) -> None:
        """Judge, again and again, until there is a verdict."""
        looked_ns = 0
        while not self._told:
            await asyncio.sleep(LOOK_S)
            now = boottime_ns()
            if self._start is not None:
                step = max(self._terms.start_ns // 20, SECOND_NS // 10)
                quiet = self._start.quiet_ns(now) * QUIET_SHARE >= self._terms.start_ns
                if quiet and now - looked_ns >= step:
                    looked_ns = now
                    await self._look(self._start)
                self._judge_start()
            elif not self._terms.headless:
                if self._progress.wants_canary(now):
                    await self._ask(now)
                self._tell("hung", self._progress.hung(boottime_ns()))

    def _judge_start(self) -> None:
        if self._start is not None and not self._terms.headless:
            self._tell("wedged", self._start.wedged(boottime_ns()))

    async def _look(self, start: StartWatch) -> None:
        """What moves in a start that says nothing."""

        def look() -> tuple[int, int]:
            return size_bytes(self._terms.caches), sum(cpu_ns(pid) for pid in self._own_pids())

        size, cpu = await asyncio.to_thread(look)
        start.grew(boottime_ns(), size)
        start.cpu(cpu)

    async def _ask(self, now: int) -> None:
        """One canary; after a silence one more page, for silence alone is no verdict."""
        self._progress = self._progress.asked(now)
        seconds = self._progress.canary_ns(now) / SECOND_NS
        answer = await self._client.heartbeat(self._terms.served, seconds)
        self._progress = self._progress.answered(boottime_ns(), answer)
        if answer == "silent" and (load := await self._client.metrics()) is not None:
            self.loaded(load)

    def _tell(self, what: Literal["hung", "wedged"], text: str | None) -> None:
        if text is not None and not self._told:
            self._told = True
            self._post(Stalled(at_ns=boottime_ns(), launch=self._terms.launch, what=what, text=text))
