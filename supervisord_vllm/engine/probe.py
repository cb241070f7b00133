"""Questions to a running engine over HTTP: /health, /metrics, and the canary, one token through what it serves.

No question raises for anything the engine does or fails to do: no answer is an answer. Each has a time-out of its own,
its reply is bounded, redirects are not followed, proxies of the environment are not used, and every question opens a
new connection, because a kept one would hide that nobody listens any more.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, final

import aiohttp

from supervisord_vllm.core.progress import Answer
from supervisord_vllm.engine.asking import (
    LARGEST_REPLY,
    NOT_SERVED,
    PATHS,
    STREAMED,
    Answered,
    Endpoint,
    Model,
    answer,
    body_of,
    first_model,
    parsed,
    reason_of,
    whole,
)
from supervisord_vllm.engine.metrics import EngineLoad, NoPage, parse_metrics

LONGEST_DETAIL = 300
NO_ANSWER = 0
"""What `EngineClient.health` says of a server that accepts but does not answer in time: busy, perhaps hung."""

Served = Literal["auto", "completions", "chat", "embeddings", "scoring"]
"""What a canary asks for: an endpoint, or the first one that answers."""

__all__ = ["LARGEST_REPLY", "NO_ANSWER", "Answered", "CanaryResult", "EngineClient", "Served"]

_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """Whether the one-token request was answered, by which endpoint or why not, how long it took, the last status, and
    what the first token took where the answer was streamed."""

    ok: bool
    detail: str
    seconds: float
    status: int | None = None
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: bytes

    def json(self) -> Any:  # noqa: ANN401 - whatever a server sends
        return parsed(self.body)


@final
class EngineClient:
    """A client of one engine.

    ``url`` is ``http://HOST:PORT[/ROOT]``, ``https://…`` or ``unix:/PATH`` (with ``root`` for a root path behind it).
    ``ca_file`` replaces the system's authorities; ``verify=False`` accepts any certificate. Times are seconds. It must
    be made and used inside a running loop, and closed.

    Raises:
        OSError: ``ca_file`` cannot be read (``ssl.SSLError``, which is one, where it holds no certificate).
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        ca_file: Path | None = None,
        verify: bool = True,
        *,
        root: str = "",
        timeout: float = 5.0,
        canary_timeout: float = 30.0,
    ) -> None:
        context: ssl.SSLContext | bool = verify
        if ca_file is not None and verify:
            context = ssl.create_default_context(cafile=str(ca_file))
        connector: aiohttp.BaseConnector
        if url.startswith("unix:"):
            connector = aiohttp.UnixConnector(path=url[len("unix:") :], force_close=True, limit=0)
            url = "http://localhost"
        else:
            connector = aiohttp.TCPConnector(ssl=context, force_close=True, limit=0)
        self._base = url.rstrip("/") + root.rstrip("/")
        self._timeout = timeout
        self._canary_timeout = canary_timeout
        self._served: Served = "auto"
        self._last_status: int | None = None
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a bounded reply must not unpack into an unbounded one
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close what is open."""
        await self._session.close()

    async def health(self) -> int | None:
        """The status of /health; `NO_ANSWER` when none came in time, ``None`` when refused or reset."""
        try:
            return (await self._ask("GET", "/health", self._timeout)).status
        except asyncio.TimeoutError:
            return NO_ANSWER
        except _FAILURES:
            return None

    async def page(self) -> EngineLoad | NoPage:
        """What /metrics says, or that there was no page, and why: no evidence of anything but itself."""
        begun = time.monotonic()

        def none(why: Literal["slow", "refused", "status"]) -> NoPage:
            return NoPage(why, time.monotonic() - begun)

        try:
            reply = await self._ask("GET", "/metrics", self._timeout)
        except asyncio.TimeoutError:
            return none("slow")
        except _FAILURES:
            return none("refused")
        if reply.status != 200:
            return none("status")
        return parse_metrics(reply.body.decode("utf-8", "replace"))

    async def metrics(self) -> EngineLoad | None:
        """What /metrics says, or ``None``: no page."""
        page = await self.page()
        return page if isinstance(page, EngineLoad) else None

    async def served_model(self) -> str | None:
        """The name under which the engine serves its base model, or ``None``."""
        try:
            reply = await self._ask("GET", "/v1/models", self._timeout)
        except _FAILURES:
            return None
        model = first_model(reply.json()) if reply.status == 200 else None
        return None if model is None else model.name

    async def canary(self, served: Served = "auto") -> CanaryResult:
        """Ask for one token, streamed where that is possible. ``auto`` tries completions, then chat, embeddings and
        scoring, and remembers what answered."""
        begun = time.monotonic()
        self._last_status = None

        def result(ok: bool, detail: str, first_token_s: float | None = None) -> CanaryResult:
            taken = time.monotonic() - begun
            return CanaryResult(ok, detail[:LONGEST_DETAIL], taken, self._last_status, first_token_s)

        try:
            return result(*await asyncio.wait_for(self._canary(served, stream=True), self._canary_timeout))
        except asyncio.TimeoutError:
            return result(False, f"no answer within {self._canary_timeout:g} s")
        except _FAILURES as error:
            return result(False, f"{type(error).__name__}: {error}")

    async def heartbeat(self, served: Served, seconds: float) -> Answer:
        """Whether an engine from which nothing comes out still answers a request of one token within ``seconds``.

        Only silence says that it hangs: an HTTP error is an answer (a paused engine says 503, a full queue too), a
        refused connection is /health's business, and an engine that says that it sleeps is left alone.
        """
        if await self._asleep():
            return "asleep"
        begun = time.monotonic()
        try:
            await asyncio.wait_for(self._canary(served, seconds=seconds), seconds)
        except asyncio.TimeoutError:
            return "silent"
        except _FAILURES:
            return "silent" if time.monotonic() - begun >= seconds else "refused"
        return "answered"

    async def _asleep(self) -> bool:
        """Whether it says that it sleeps or is paused: /is_sleeping (0.8.5 on) and /is_paused (0.12 on) answer in dev
        mode alone, which sleeping needs as well."""
        for path, key in (("/is_sleeping", "is_sleeping"), ("/is_paused", "is_paused")):
            try:
                reply = await self._ask("GET", path, self._timeout)
            except _FAILURES:
                return False
            answer = reply.json() if reply.status == 200 else None
            if isinstance(answer, dict) and answer.get(key) is True:
                return True
        return False

    async def endpoint(self, served: Served, seconds: float) -> tuple[Endpoint, Model] | None:
        """The endpoint that is asked for, or that answers a canary (``auto``), and the model; ``None``: not known."""
        if served == "auto" and self._served == "auto":
            await self.canary()  # that of another daemon was answered
        known = self._served if served == "auto" else served
        try:
            reply = await self._ask("GET", "/v1/models", seconds)
        except _FAILURES:
            return None
        model = first_model(reply.json()) if reply.status == 200 else None
        return None if model is None or known == "auto" else (known, model)

    async def request(
        self,
        endpoint: Endpoint,
        model: str,
        words: str,
        tokens: int,
        *,
        seconds: float,
        on_token: Callable[[], None] = lambda: None,
    ) -> Answered:
        """One request, streamed where that is possible. Status 0: no answer, refused, broken off or too late."""
        begun = time.monotonic()
        try:
            return await self._request(endpoint, model, words, tokens, seconds, stream=True, on_token=on_token)
        except asyncio.TimeoutError:
            return Answered(0, False, f"no answer within {seconds:g} s", seconds=time.monotonic() - begun)
        except _FAILURES as error:
            reason = f"{type(error).__name__}: {error}"[:LONGEST_DETAIL]
            return Answered(0, False, reason, seconds=time.monotonic() - begun)

    async def _canary(
        self, served: Served, *, seconds: float | None = None, stream: bool = False
    ) -> tuple[bool, str, float | None]:
        patience = self._canary_timeout if seconds is None else seconds
        reply = await self._ask("GET", "/v1/models", patience)
        model = first_model(reply.json()) if reply.status == 200 else None
        if model is None:
            return False, f"/v1/models: {reason_of(reply.status, reply.json())}", None
        known = self._served if served == "auto" else served
        refusals: list[str] = []
        for kind in tuple(PATHS) if known == "auto" else (known,):
            said = await self._request(kind, model.name, "a", 1, patience, stream=stream)
            if said.ok:
                self._served = kind
                return True, PATHS[kind], said.first_token_s
            refusals.append(f"{PATHS[kind]}: {said.reason}")
            if said.status not in NOT_SERVED:
                break
        return False, "; ".join(refusals), None

    async def _request(
        self,
        endpoint: Endpoint,
        model: str,
        words: str,
        tokens: int,
        seconds: float,
        *,
        stream: bool,
        on_token: Callable[[], None] = lambda: None,
    ) -> Answered:
        body = body_of(endpoint, model, words, tokens, stream=stream and endpoint in STREAMED)
        begun = time.monotonic()
        async with self._open("POST", PATHS[endpoint], seconds, body) as response:
            self._last_status = response.status
            return await answer(response, begun, on_token)

    async def _ask(self, method: str, path: str, seconds: float) -> _Reply:
        async with self._open(method, path, seconds) as response:
            read = await whole(response)
            self._last_status = response.status
            return _Reply(response.status, read)

    def _open(
        self, method: str, path: str, seconds: float, body: object = None
    ) -> aiohttp.client._RequestContextManager:
        return self._session.request(
            method,
            self._base + path,
            json=body,
            allow_redirects=False,
            headers={"Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=seconds),
        )
