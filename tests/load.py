"""Clients of an engine behind a load balancer: requests at a fixed rate, as long as the supervisor says ready.

What comes while it is not ready waits at the balancer and goes out in one burst, at most ``BACKLOG``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import aiohttp

BACKLOG = 40
READY_EVERY_S = 0.05


class Load:
    """Requests a second, each with so many prompt and output tokens; `done` are the times of those answered."""

    def __init__(self, port: int, http: int, rate: float, prompt: int, output: int) -> None:
        self.done: list[float] = []
        self.failed: list[str] = []
        self._url, self._ready_url = f"http://127.0.0.1:{port}/v1/completions", f"http://127.0.0.1:{http}/readyz"
        self._rate = rate
        self._body = {"prompt": "word" * prompt, "max_tokens": output}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """No more requests; those under way are given up."""
        self._stop.set()
        self._thread.join(60)

    def rate_between(self, since: float, until: float) -> float:
        """Answers a second between two times of ``time.monotonic``."""
        return sum(since <= at < until for at in self.done) / (until - since)

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            requests: set[asyncio.Task[None]] = set()
            owed, last, ready_at, ready = 0.0, time.monotonic(), 0.0, False
            while not self._stop.is_set():
                now = time.monotonic()
                owed, last = min(owed + (now - last) * self._rate, float(BACKLOG)), now
                if now >= ready_at:
                    ready, ready_at = await self._ready(session), now + READY_EVERY_S
                for _ in range(int(owed) if ready else 0):
                    owed -= 1
                    task = asyncio.create_task(self._ask(session))
                    requests.add(task)
                    task.add_done_callback(requests.discard)
                await asyncio.sleep(0.01)
            for task in tuple(requests):
                task.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    async def _ready(self, session: aiohttp.ClientSession) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with session.get(self._ready_url) as answer:
                return answer.status == 200
        return False

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.post(self._url, json=self._body) as answer:
                await answer.read()
                if answer.status == 200:
                    self.done.append(time.monotonic())
                else:
                    self.failed.append(f"{answer.status}")
        except (aiohttp.ClientError, OSError) as error:
            self.failed.append(repr(error))


@contextlib.contextmanager
def loaded(port: int, http: int, *, rate: float, prompt: int, output: int) -> Iterator[Load]:
    """Load for as long as the block lasts."""
    load = Load(port, http, rate, prompt, output)
    load.start()
    try:
        yield load
    finally:
        load.stop()
