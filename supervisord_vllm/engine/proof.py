"""The burst of a launch's proof: many requests at once, all of which must be answered, but never in a user's way.

What the engine turns away by its own queue limit (503, 429) is no failure, nor is a request that does not suit it
(another 4xx): only an error of the server, an answer that breaks off, or silence. Real traffic goes first. What runs or
waits beyond our own requests is read from /metrics several times a second; the burst shrinks by as much, is withdrawn
entirely where anything of it waits, and what real traffic finishes counts in its place. It never lasts longer than its
deadline: an engine that is slow, or busy until then, is not failed for that.

A burst that is cancelled closes its connections before it returns; vLLM then drops the requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import final

from supervisord_vllm.engine.asking import Answered, Endpoint, Model
from supervisord_vllm.engine.metrics import EngineLoad
from supervisord_vllm.engine.probe import EngineClient, Served

LOOK_S = 0.25
"""Between two looks at the real traffic."""
OTHERS_S = 2.0
"""After the first failure the other requests may still end by themselves, to be counted."""
MODELS_S = 10.0
TURNED_AWAY = frozenset({429, 503})
UNSUITED = frozenset({400, 413, 422})
"""What vLLM says of a prompt that is too long; a shorter one is tried."""
ROOM = 32
"""Tokens that a chat template may add to a prompt."""


@dataclass(frozen=True, slots=True)
class BurstOrder:
    """So many requests at once of about so many tokens each, over after ``deadline_s`` seconds."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    deadline_s: float
    served: Served = "auto"


@dataclass(frozen=True, slots=True)
class BurstResult:
    """What came of it; see `supervisord_vllm.core.facts.BurstDone` for the meaning of the fields."""

    ok: bool
    answered: int = 0
    failed: int = 0
    refused: int = 0
    real: int = 0
    seconds: float = 0.0
    first_token_s: float | None = None
    silent: bool = False
    detail: str = ""


def fitted(order: BurstOrder, max_model_len: int | None) -> tuple[int, int]:
    """Prompt and output tokens that any model of this length takes; a word may be two tokens."""
    if max_model_len is None:
        return order.prompt_tokens, order.output_tokens
    output = max(1, min(order.output_tokens, max_model_len // 4))
    return max(1, min(order.prompt_tokens, (max_model_len - output) // 2 - ROOM)), output


def prompt(number: int, tokens: int) -> str:
    """A text of about so many tokens that begins as no other: a prefix cache must not answer for the engine."""
    return " ".join([str(number), *("a" for _ in range(tokens - 1))])


@final
class Burst:
    """One burst. `run` carries it out; the properties tell how far it is."""

    def __init__(self, client: EngineClient, order: BurstOrder, changed: Callable[[], None] = lambda: None) -> None:
        self.order = order
        self._client = client
        self._changed = changed
        self._numbers = itertools.count(1)
        self._flying: dict[asyncio.Task[Answered], None] = {}
        self._words = order.prompt_tokens
        self._answered = self._failed = self._refused = self._withdrawn = self._tokens = 0
        self._firsts: list[float] = []
        self._detail = ""
        self._real = self._real_now = 0
        self._met = False
        self._peak = self._peak_before = 0
        self._finished_before: int | None = None
        self._room = 0

    @property
    def done(self) -> int:
        """Requests that are over, or that real traffic has made needless."""
        return min(self.order.requests, self._answered + self._refused + self._failed + self._real)

    @property
    def yields(self) -> bool:
        """Whether real traffic keeps it below its size."""
        return self._real_now > 0

    async def run(self) -> BurstResult:
        """Carry it out. Nothing that the engine does or fails to do raises."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        served = await self._served(begun + self.order.deadline_s)
        if served is None:
            return BurstResult(
                False, failed=self.order.requests, seconds=loop.time() - begun, detail="/v1/models gave no answer"
            )
        endpoint, model = served
        self._words, tokens = fitted(self.order, model.max_model_len)
        try:
            late = await self._fly(endpoint, model.name, tokens, begun + self.order.deadline_s)
        finally:
            await self._withdraw(len(self._flying))
        silent = late and not (self._met or self._tokens or self._answered or self._refused)
        if late and not silent:
            why = "the rest gave way to real traffic" if self._met else "it is slow"
            self._detail = f"{self._answered} of {self.order.requests} were answered in time: {why}"
        return BurstResult(
            ok=not self._failed and not silent,
            answered=self._answered,
            failed=self._failed,
            refused=self._refused,
            real=self._real,
            seconds=loop.time() - begun,
            first_token_s=round(median(self._firsts), 4) if self._firsts else None,
            silent=silent,
            detail=self._detail,
        )

    async def _served(self, deadline: float) -> tuple[Endpoint, Model] | None:
        """What the canary was answered by; an engine that just answered one may be slow to say so again."""
        loop = asyncio.get_running_loop()
        deadline = min(deadline, loop.time() + MODELS_S)
        while True:
            found = await self._client.endpoint(self.order.served, MODELS_S)
            if found is not None or loop.time() >= deadline:
                return found
            await asyncio.sleep(LOOK_S)

    async def _fly(self, endpoint: Endpoint, model: str, tokens: int, deadline: float) -> bool:
        """Send, watch, give way; whether the deadline ended it."""
        loop = asyncio.get_running_loop()
        look_at = 0.0
        while self.done < self.order.requests:
            now = loop.time()
            if now >= deadline:
                return True
            if now >= look_at:
                self._look(await self._client.metrics())
                look_at = loop.time() + LOOK_S
                await self._withdraw(len(self._flying) - self._room)
            while len(self._flying) < min(self._room, self.order.requests - self.done):
                self._send(endpoint, model, tokens, deadline - now + MODELS_S)
            wait = max(0.0, min(look_at, deadline) - loop.time())
            if self._flying:
                await asyncio.wait(tuple(self._flying), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(wait)
            self._gather()
            if self._failed:
                if self._flying:
                    await asyncio.wait(tuple(self._flying), timeout=OTHERS_S)
                self._gather()
                return False
        return False

    def _look(self, load: EngineLoad | None) -> None:
        """How many of the burst's requests may fly, beside the real traffic of this page."""
        recent, self._peak_before, self._peak = max(self._peak, self._peak_before), self._peak, len(self._flying)
        if not isinstance(load, EngineLoad) or load.running is None or load.waiting is None:
            self._room = self.order.requests  # an engine without statistics tells of nobody
            return
        finished = load.request_success_total
        if self._finished_before is None:
            self._finished_before = finished
        real = max(0, load.running + load.waiting - recent)
        self._met = self._met or (real > 0 and self._real_now > 0)  # one look may still see our own canary
        if self._met and finished is not None and self._finished_before is not None:
            own = self._answered + self._failed + self._withdrawn + len(self._flying)
            self._real = max(self._real, finished - self._finished_before - own)
        before, self._real_now = self._real_now, real
        self._room = 0 if real and load.waiting else max(0, self.order.requests - real)
        if (before > 0) is not (real > 0):
            self._changed()

    def _send(self, endpoint: Endpoint, model: str, tokens: int, seconds: float) -> None:
        task = asyncio.get_running_loop().create_task(
            self._one(endpoint, model, next(self._numbers), tokens, seconds), name="burst"
        )
        self._flying[task] = None
        self._peak = max(self._peak, len(self._flying))

    async def _one(self, endpoint: Endpoint, model: str, number: int, tokens: int, seconds: float) -> Answered:
        while True:
            words = self._words
            said = await self._client.request(
                endpoint, model, prompt(number, words), tokens, seconds=seconds, on_token=self._token
            )
            if said.status not in UNSUITED or words <= 1:
                return said
            self._words = min(self._words, words // 2)

    def _token(self) -> None:
        self._tokens += 1

    def _gather(self) -> None:
        """Count what is over."""
        before = self.done
        for task in [task for task in self._flying if task.done()]:
            del self._flying[task]
            said = task.result()
            if said.ok:
                self._answered += 1
                if said.first_token_s is not None:
                    self._firsts.append(said.first_token_s)
            elif said.status in TURNED_AWAY or 400 <= said.status < 500:
                self._refused += 1
                self._detail = self._detail or said.reason
            else:
                self._failed += 1
                self._detail = said.reason
        if self.done != before:
            self._changed()

    async def _withdraw(self, count: int) -> None:
        """Take back the youngest requests; they are sent again where there is room."""
        if count <= 0:
            return
        youngest = list(self._flying)[-count:]
        for task in youngest:
            task.cancel()
        await asyncio.gather(*youngest, return_exceptions=True)
        for task in youngest:
            if task.cancelled():
                del self._flying[task]
                self._withdrawn += 1
        self._peak = self._peak_before = len(self._flying)
        self._gather()
