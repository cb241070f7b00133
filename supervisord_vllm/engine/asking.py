"""One request to the inference API of an engine: its body by endpoint, and its answer, streamed or in one piece.

Sources: vLLM's ``entrypoints/openai`` and ``entrypoints/pooling`` (0.6 to 0.33). A stream has status 200 before its
first token, so that a failure comes as a chunk with ``error``; it ends with ``[DONE]``. An answer is hostile: bounded,
and whatever is not understood is no token.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

Endpoint = Literal["completions", "chat", "embeddings", "scoring"]

PATHS: Mapping[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
    "scoring": "/v1/score",
}
STREAMED: frozenset[Endpoint] = frozenset({"completions", "chat"})
"""Endpoints that answer token by token."""
NOT_SERVED = frozenset({400, 404, 405, 422, 501})
"""What vLLM says of an endpoint that does not suit the model (no chat template, an embedding model)."""
LARGEST_REPLY = 4 << 20
"""Bytes; a /metrics page of a server with many models is some 100 KiB."""


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine says of its base model; ``max_model_len`` in tokens, ``None`` where it does not say."""

    name: str
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer: ``ok`` with a result, else ``reason`` says why not. Times are seconds since the request was sent."""

    status: int
    ok: bool
    reason: str = ""
    tokens: int = 0
    first_token_s: float | None = None
    seconds: float = 0.0


def body_of(endpoint: Endpoint, model: str, words: str, tokens: int, *, stream: bool) -> dict[str, object]:
    """The body of a request that brings ``words`` and asks for exactly ``tokens`` tokens, where tokens come at all."""
    if endpoint == "embeddings":
        return {"model": model, "input": words}
    if endpoint == "scoring":
        return {"model": model, "text_1": "a", "text_2": words}
    asked: dict[str, object] = {"model": model, "max_tokens": tokens, "temperature": 0}
    if tokens > 1:
        asked["ignore_eos"] = True
    if stream:
        asked["stream"] = True
    if endpoint == "chat":
        return {**asked, "messages": [{"role": "user", "content": words}]}
    return {**asked, "prompt": words}


async def answer(response: aiohttp.ClientResponse, begun: float, on_token: Callable[[], None]) -> Answered:
    """Read an answer to its end; ``begun`` is `time.monotonic` of the request. Raises what aiohttp raises, and
    ``ValueError`` for a reply without end."""
    kind = response.headers.get("Content-Type", "")
    if response.status == 200 and kind.startswith("text/event-stream"):
        return await _streamed(response, begun, on_token)
    read = await whole(response)
    seconds = time.monotonic() - begun
    if response.status != 200:
        return Answered(response.status, False, reason_of(response.status, parsed(read)), seconds=seconds)
    if not has_result(parsed(read)):
        return Answered(200, False, "200 without a result", seconds=seconds)
    on_token()
    return Answered(200, True, seconds=seconds)


async def _streamed(response: aiohttp.ClientResponse, begun: float, on_token: Callable[[], None]) -> Answered:
    tokens, first, ended, reason = 0, None, False, ""
    async for data in _events(response):
        if data == b"[DONE]":
            ended = True
            continue
        chunk = parsed(data)
        if not isinstance(chunk, dict):
            continue
        if chunk.get("error"):
            code = chunk["error"].get("code") if isinstance(chunk["error"], dict) else None
            reason = reason or reason_of(code if isinstance(code, int) else 200, chunk)
            continue
        advanced, finished = _progress(chunk)
        if advanced:
            tokens += 1
            first = time.monotonic() - begun if first is None else first
            on_token()
        ended = ended or finished
    seconds = time.monotonic() - begun
    if not reason and not (ended and tokens):
        reason = "200 without a result" if not tokens else "the stream broke off"
    return Answered(200, not reason, reason, tokens, first, seconds)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of server-sent events, one line each."""
    pending, read = bytearray(), 0
    async for piece in response.content.iter_any():
        read += len(piece)
        if read > LARGEST_REPLY:
            raise ValueError(f"reply of more than {LARGEST_REPLY >> 20} MiB")
        pending += piece
        *lines, rest = pending.split(b"\n")
        pending = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:"):
                yield bytes(line[5:]).strip()


def _progress(chunk: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a chunk brings a token, and whether it is the last of its choice; a token may decode to no text."""
    choices = chunk.get("choices")
    found = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    finished = any(choice.get("finish_reason") for choice in found)
    texts = [text for choice in found for text in _texts(choice)]
    return finished or any(texts), finished


def _texts(choice: Mapping[str, Any]) -> list[object]:
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else {}
    return [
        choice.get("text"),
        *(parts.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")),
    ]


async def whole(response: aiohttp.ClientResponse) -> bytes:
    """The body, at most `LARGEST_REPLY` of it.

    Raises:
        ValueError: it is longer.
    """
    read = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        read += chunk
        if len(read) > LARGEST_REPLY:
            raise ValueError(f"reply of more than {LARGEST_REPLY >> 20} MiB")
    return bytes(read)


def parsed(body: bytes) -> Any:  # noqa: ANN401 - whatever a server sends
    """JSON, or ``None``."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def first_model(listed: object) -> Model | None:
    """The first model of /v1/models without a parent (a LoRA adapter has one), else the first."""
    data = listed.get("data") if isinstance(listed, dict) else None
    models = [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
    models.sort(key=lambda model: model.get("parent") is not None)
    if not models or not isinstance(models[0].get("id"), str):
        return None
    length = models[0].get("max_model_len")
    known = isinstance(length, int) and not isinstance(length, bool) and length > 0
    return Model(models[0]["id"], length if known else None)


def has_result(said: object) -> bool:
    """Whether an answer in one piece holds a completion, an embedding or a score."""
    return isinstance(said, dict) and bool(said.get("choices") or said.get("data"))


def reason_of(status: int, said: object) -> str:
    """The status and the server's own message, as vLLM and FastAPI put it."""
    error = said.get("error", said) if isinstance(said, dict) else None
    message = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    if status in {401, 403}:
        return f"{status}, the API key was refused"
    return f"{status} {message}"[:200] if isinstance(message, str) and message else str(status)
