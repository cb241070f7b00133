"""Questions to a running engine over HTTP: /health, /metrics, and the canary, one token through what it serves.

No question raises for anything the engine does or fails to do: no answer is an answer. Each has a time-out of its own,
its reply is bounded, redirects are not followed, proxies of the environment are not used, and every question opens a
new connection, because a kept one would hide that nobody listens any more.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, final

import aiohttp

from supervisord_vllm.core.progress import Answer
from supervisord_vllm.engine.metrics import EngineLoad, parse_metrics

LARGEST_REPLY = 4 << 20
"""Bytes; a /metrics page of a server with many models is some 100 KiB."""
LONGEST_DETAIL = 300
NO_ANSWER = 0
"""What `EngineClient.health` says of a server that accepts but does not answer in time: busy, perhaps hung."""

Served = Literal["auto", "completions", "chat", "embeddings"]

_PATHS: Mapping[str, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
}
_NOT_SERVED = frozenset({400, 404, 405, 422, 501})
"""What vLLM says of an endpoint that does not suit the model (no chat template, an embedding model)."""

_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """Whether the one-token request was answered, by which endpoint or why not, how long it took, the last status."""

    ok: bool
    detail: str
    seconds: float
    status: int | None = None


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: bytes

    def json(self) -> Any:  # noqa: ANN401 - whatever a server sends
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


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
            connector = aiohttp.UnixConnector(path=url[len("unix:") :], force_close=True)
            url = "http://localhost"
        else:
            connector = aiohttp.TCPConnector(ssl=context, force_close=True)
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

    async def metrics(self) -> EngineLoad | None:
        """What /metrics says, or ``None``: no page. A failed scrape is no evidence."""
        try:
            reply = await self._ask("GET", "/metrics", self._timeout)
        except _FAILURES:
            return None
        if reply.status != 200:
            return None
        return parse_metrics(reply.body.decode("utf-8", "replace"))

    async def served_model(self) -> str | None:
        """The name under which the engine serves its base model, or ``None``."""
        try:
            reply = await self._ask("GET", "/v1/models", self._timeout)
        except _FAILURES:
            return None
        return _first_model(reply.json()) if reply.status == 200 else None

    async def canary(self, served: Served = "auto") -> CanaryResult:
        """Ask for one token. ``auto`` tries completions, then chat, then embeddings, and remembers what answered."""
        begun = time.monotonic()
        self._last_status = None

        def result(ok: bool, detail: str) -> CanaryResult:
            return CanaryResult(ok, detail[:LONGEST_DETAIL], time.monotonic() - begun, self._last_status)

        try:
            return result(*await asyncio.wait_for(self._canary(served), self._canary_timeout))
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
            await asyncio.wait_for(self._canary(served, seconds), seconds)
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

    async def _canary(self, served: Served, seconds: float | None = None) -> tuple[bool, str]:
        patience = self._canary_timeout if seconds is None else seconds
        reply = await self._ask("GET", "/v1/models", patience)
        model = _first_model(reply.json()) if reply.status == 200 else None
        if model is None:
            return False, f"/v1/models: {_reason(reply)}"
        known = self._served if served == "auto" else served
        refusals: list[str] = []
        for kind in _PATHS if known == "auto" else (known,):
            reply = await self._ask("POST", _PATHS[kind], patience, _request(kind, model))
            if reply.status == 200:
                if not _has_result(reply.json()):
                    return False, f"{_PATHS[kind]}: 200 without a result"
                self._served = kind  # type: ignore[assignment]
                return True, _PATHS[kind]
            refusals.append(f"{_PATHS[kind]}: {_reason(reply)}")
            if reply.status not in _NOT_SERVED:
                break
        return False, "; ".join(refusals)

    async def _ask(self, method: str, path: str, seconds: float, body: object = None) -> _Reply:
        async with self._session.request(
            method,
            self._base + path,
            json=body,
            allow_redirects=False,
            headers={"Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=seconds),
        ) as response:
            read = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                read += chunk
                if len(read) > LARGEST_REPLY:
                    raise ValueError(f"reply of more than {LARGEST_REPLY >> 20} MiB")
            self._last_status = response.status
            return _Reply(response.status, bytes(read))


def _request(kind: str, model: str) -> dict[str, object]:
    if kind == "embeddings":
        return {"model": model, "input": "a"}
    one_token: dict[str, object] = {"model": model, "max_tokens": 1, "temperature": 0}
    if kind == "chat":
        return {**one_token, "messages": [{"role": "user", "content": "a"}]}
    return {**one_token, "prompt": "a"}


def _first_model(answer: object) -> str | None:
    """The first model without a parent (a LoRA adapter has one), else the first."""
    listed = answer.get("data") if isinstance(answer, dict) else None
    models = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    models.sort(key=lambda model: model.get("parent") is not None)
    name = models[0].get("id") if models else None
    return name if isinstance(name, str) else None


def _has_result(answer: object) -> bool:
    return isinstance(answer, dict) and bool(answer.get("choices") or answer.get("data"))


def _reason(reply: _Reply) -> str:
    """The status and the server's own message, as vLLM and FastAPI put it."""
    answer = reply.json()
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    message = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    if reply.status in {401, 403}:
        return f"{reply.status}, the API key was refused"
    return f"{reply.status} {message}"[:200] if isinstance(message, str) and message else str(reply.status)
