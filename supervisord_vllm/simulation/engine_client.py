"""The API server's side of the EngineCore: it starts the process, sends requests and hands out tokens as they come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from supervisord_vllm.simulation.link import Message, encode

if TYPE_CHECKING:
    from supervisord_vllm.simulation.metrics_page import MetricsPage


class EngineDeadError(Exception):
    """EngineCore is gone: vLLM's ``EngineDeadError``."""


class EngineClient:
    """One EngineCore. `died` is set when it is gone without having been asked."""

    def __init__(self) -> None:
        self.died = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self.stopping = False
        self.metrics: MetricsPage | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.exit_code: int | None = None
        self.exit_asked = asyncio.Event()
        self.stats: Message = {"running": 0, "waiting": 0, "kv_usage": 0.0, "preemptions": 0}
        self.totals = {"prompt": 0, "generation": 0}
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None
        self._queues: dict[str, asyncio.Queue[str]] = {}
        self._began: dict[str, float] = {}
        self._numbers = itertools.count(1)
        self._task: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        """Requests that wait for tokens."""
        return len(self._queues)

    async def spawn(self, order: Message) -> None:
        """Start the process and tell it what to run."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "supervisord_vllm.simulation.engine_core",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(encode(order))

    async def ready(self) -> Message | None:
        """Wait for the end of the start; ``None`` when the process died in it."""
        message = await self._next()
        if message is not None and message["type"] == "exit":
            self._leave(message)
        return message

    def listen(self, metrics: MetricsPage) -> None:
        """Begin to hand out tokens."""
        self.metrics = metrics
        self._task = asyncio.create_task(self._pump())

    async def generate(self, prompt: int, max_tokens: int) -> AsyncIterator[int]:
        """Tokens of one request as their numbers 1, 2, ...; raises `EngineDeadError`."""
        if self.died.is_set() or self._writer is None or self.metrics is None:
            raise EngineDeadError
        name = f"cmpl-{os.getpid():x}-{next(self._numbers):08x}"
        queue = self._queues[name] = asyncio.Queue()
        self.idle.clear()
        begun = last = time.monotonic()
        finished = "abort"
        try:
            self._writer.write(encode({"type": "add", "id": name, "prompt": prompt, "max_tokens": max_tokens}))
            for number in range(1, max_tokens + 1):
                if await queue.get() == "dead":
                    finished = "error"
                    raise EngineDeadError
                now = time.monotonic()
                (self.metrics.first_token if number == 1 else self.metrics.inter_token).observe(now - last)
                last = now
                yield number
            finished = "length"
            self.metrics.latency.observe(time.monotonic() - begun)
            self.metrics.request_prompt.observe(prompt)
            self.metrics.request_generation.observe(max_tokens)
            self.metrics.queue_time.observe(max(0.0, self._began.get(name, begun) - begun))
        finally:
            del self._queues[name]
            self._began.pop(name, None)
            if not self._queues:
                self.idle.set()
            self.metrics.success[finished].inc()
            if finished == "abort" and not self.died.is_set():
                self._writer.write(encode({"type": "abort", "id": name}))

    def fail_requests(self) -> None:
        """Tell every waiting request that the engine is dead."""
        for queue in self._queues.values():
            queue.put_nowait("dead")

    async def end(self, grace: float) -> None:
        """SIGTERM to EngineCore, SIGKILL after ``grace`` seconds."""
        self.stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), grace)
            except asyncio.TimeoutError:
                process.kill()
                await process.wait()

    async def _pump(self) -> None:
        while (message := await self._next()) is not None:
            if message["type"] == "exit":
                self._leave(message)
            else:
                self._count(message)
        if not self.stopping:
            self.died.set()
            if self.process is not None:
                await self.process.wait()
            self.fail_requests()

    def _count(self, message: Message) -> None:
        metrics = self.metrics
        if metrics is None:
            return
        metrics.running.set(message["running"])
        metrics.waiting.set(message["waiting"])
        metrics.waiting_for_capacity.set(message["waiting"])
        metrics.kv_usage.set(message["kv_usage"])
        metrics.preemptions.inc(message["preemptions"] - self.stats["preemptions"])
        metrics.prompt_tokens.inc(message["prompt_tokens"])
        metrics.generation_tokens.inc(len(message["advanced"]))
        if message["tokens"]:
            metrics.iteration_tokens.observe(message["tokens"])
        self.stats = message
        self.totals["prompt"] += message["prompt_tokens"]
        self.totals["generation"] += len(message["advanced"])
        self._began.update({name: time.monotonic() for name in message["admitted"] if name in self._queues})
        for name in message["advanced"]:
            if name in self._queues:
                self._queues[name].put_nowait("token")

    def _leave(self, message: Message) -> None:
        self.exit_code = int(message["code"])
        self.exit_asked.set()

    async def _next(self) -> Message | None:
        if self._reader is None:
            return None
        try:
            line = await self._reader.readline()
        except (OSError, ValueError):
            return None
        if not line.endswith(b"\n"):
            return None
        message: Message = json.loads(line)
        return message
