"""Requests as a user sends them, and how many of them were answered.

Every prompt is made of random token numbers, so that no prefix cache answers for the engine. A request is good when it
was answered with every token that was asked for: a stream that breaks off, an error and a refused connection are not.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from supervisord_vllm.clock import boottime_ns


@dataclass(frozen=True)
class Answer:
    """One request: when it was sent (CLOCK_BOOTTIME), whether it was good, how long it took, what went wrong."""

    at_ns: int
    ok: bool
    seconds: float
    error: str = ""


def ask(port: int, prompt_tokens: int, max_tokens: int, seconds: float = 120.0) -> Answer:
    """One completion."""
    began = boottime_ns()
    prompt = [random.randint(3, 500) for _ in range(prompt_tokens)]  # noqa: S311 - tokens, no secrets
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    error = ""
    try:
        with opener.open(request, timeout=seconds) as answer:
            got = json.load(answer)["usage"]["completion_tokens"]
        if got != max_tokens:
            error = f"{got} of {max_tokens} tokens"
    except urllib.error.HTTPError as refused:
        error = f"HTTP {refused.code}"
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as broken:
        error = type(getattr(broken, "reason", broken)).__name__
    return Answer(began, not error, (boottime_ns() - began) / 1e9, error)


def burst(port: int, count: int, prompt_tokens: int, max_tokens: int) -> list[Answer]:
    """This many completions at once."""
    with ThreadPoolExecutor(count) as clients:
        return list(clients.map(lambda _: ask(port, prompt_tokens, max_tokens), range(count)))


class Trickle:
    """A user who asks for a few tokens four times a second, whatever happens, until the block ends."""

    EVERY_S = 0.25

    def __init__(self, port: int) -> None:
        self.answers: list[Answer] = []
        self._port = port
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Trickle:  # noqa: PYI034 - `Self` is new in 3.11
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(150)

    def _run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self.answers.append(ask(self._port, 16, 4))
            self._over.wait(max(0.0, self.EVERY_S - (time.monotonic() - began)))


class Crowd:
    """So many users, each of whom asks again as soon as an answer came, until the block ends or `leave`."""

    PAUSE_S = 0.5
    """After a request that failed: an engine that restarts is not stormed."""

    def __init__(self, port: int, users: int, prompt_tokens: int, max_tokens: int) -> None:
        self.answers: list[Answer] = []
        self._request = (port, prompt_tokens, max_tokens)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(users)]

    def __enter__(self) -> Crowd:  # noqa: PYI034 - `Self` is new in 3.11
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """No more requests; waits for those that are under way."""
        self._over.set()
        for thread in self._threads:
            thread.join(150)

    def rate(self, seconds: float) -> float:
        """Good answers a second that came within the last so many seconds."""
        since = boottime_ns() - int(seconds * 1e9)
        good = [answer for answer in list(self.answers) if answer.ok and answer.at_ns + answer.seconds * 1e9 >= since]
        return len(good) / seconds

    def settle(self, seconds: float) -> None:
        """Waits until a stretch of so many seconds has gone by in which this load was served."""
        self._over.wait(seconds + 5)

    def _run(self) -> None:
        while not self._over.is_set():
            answer = ask(*self._request, seconds=300.0)
            self.answers.append(answer)
            if not answer.ok:
                self._over.wait(self.PAUSE_S)


def summary(answers: Iterable[Answer]) -> dict[str, object]:
    """Counts, the seconds between the first failure and the last, and the errors by name."""
    seen = list(answers)
    failed = [answer for answer in seen if not answer.ok]
    errors: dict[str, int] = {}
    for answer in failed:
        errors[answer.error] = errors.get(answer.error, 0) + 1
    times = sorted(answer.at_ns for answer in failed)
    return {
        "sent": len(seen),
        "failed": len(failed),
        "failing_for_s": round((times[-1] - times[0]) / 1e9, 1) if times else 0.0,
        "errors": errors,
    }
