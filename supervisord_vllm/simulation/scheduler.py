"""vLLM's continuous batching in small: waiting and running requests, KV blocks, chunked prefill, preemption.

Pure: no clock and no I/O. A request that is preempted loses its blocks and is computed again from its first token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from supervisord_vllm.simulation.ledger import BLOCK


@dataclass(slots=True)
class Request:
    """One request. ``computed`` counts the tokens whose keys and values are in the cache."""

    id: str
    prompt: int
    max_tokens: int
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    admitted: bool = False

    @property
    def length(self) -> int:
        """Prompt and generated tokens so far."""
        return self.prompt + self.generated


@dataclass(slots=True)
class Step:
    """One iteration: tokens scheduled in all, of them prompt tokens, who began, who got a token, who is done."""

    tokens: int = 0
    prompt_tokens: int = 0
    admitted: list[str] = field(default_factory=list)
    """Requests that are computed for the first time."""
    advanced: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)


class Scheduler:
    """Requests on ``blocks`` KV blocks, at most ``max_seqs`` at once and ``max_tokens`` tokens in a step."""

    def __init__(self, blocks: int, max_seqs: int, max_tokens: int) -> None:
        self.blocks = blocks
        self.free = blocks
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.admitted = 0
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting or self.running)

    @property
    def usage(self) -> float:
        """Share of the blocks that live requests hold."""
        return 1 - self.free / self.blocks if self.blocks else 0.0

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is."""
        for request in [*self.running, *self.waiting]:
            if request.id == request_id:
                self._drop(request)
        self.running = [request for request in self.running if request.id != request_id]
        self.waiting = deque(request for request in self.waiting if request.id != request_id)

    def step(self) -> Step:
        """Schedule and "compute" one step."""
        step = Step()
        budget = self.max_tokens
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            count = min(budget, request.length - request.computed)
            while not self._reserve(request, request.computed + count) and self._preempt(request):
                pass
            if request in self.running:
                budget -= self._compute(request, count, step)
        while self.waiting and len(self.running) < self.max_seqs and budget > 0:
            request = self.waiting[0]
            if not self._reserve(request, request.length):
                break
            self.waiting.popleft()
            self.running.append(request)
            if not request.admitted:
                request.admitted = True
                self.admitted += 1
                step.admitted.append(request.id)
            budget -= self._compute(request, min(budget, request.length), step)
        for request in [r for r in self.running if r.generated >= r.max_tokens]:
            self._drop(request)
            self.running.remove(request)
            step.finished.append(request.id)
        return step

    def _compute(self, request: Request, count: int, step: Step) -> int:
        prompt = max(0, min(count, request.prompt - request.computed))
        request.computed += count
        step.tokens += count
        step.prompt_tokens += prompt
        if request.computed >= request.length:
            request.generated += 1
            step.advanced.append(request.id)
        return count

    def _reserve(self, request: Request, tokens: int) -> bool:
        wanted = -(-tokens // BLOCK) - request.blocks
        if wanted > self.free:
            return False
        self.free -= wanted
        request.blocks += wanted
        return True

    def _preempt(self, needy: Request) -> bool:
        victim = self.running.pop()
        self._drop(victim)
        victim.computed = 0
        self.waiting.appendleft(victim)
        self.preemptions += 1
        return victim is not needy

    def _drop(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = 0
