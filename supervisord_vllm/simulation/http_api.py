"""The HTTP face of the stand-in: the endpoints of vLLM's OpenAI server that a supervisor or a client uses.

/health is an in-process flag as in vLLM: 200 while EngineCore hangs, 503 once it is dead.
"""

from __future__ import annotations

import hmac
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import web

from supervisord_vllm.simulation import texts
from supervisord_vllm.simulation.console import Console
from supervisord_vllm.simulation.engine_client import EngineClient, EngineDeadError
from supervisord_vllm.simulation.tracebacks import HEADER, SERVER, frames

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_WORDS = ("the", "engine", "answers", "one", "word", "after", "another", "until", "it", "is", "told", "to", "stop")
_CHAT_DEFAULT = 32
"""Tokens of a chat answer without ``max_tokens``; a real model would stop by itself."""


@dataclass(frozen=True)
class Face:
    """What the endpoints need to know."""

    client: EngineClient
    console: Console
    served: Sequence[str]
    root: str
    max_model_len: int
    api_keys: Sequence[str]
    access_log: bool


class BadRequestError(Exception):
    """A request that vLLM answers with an error object."""

    def __init__(
        self, message: str, param: str | None = None, kind: str = "BadRequestError", status: int = 400
    ) -> None:
        super().__init__(message)
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
        self.status = status


def make_app(face: Face) -> web.Application:
    """The application; it is served by the caller."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if face.api_keys and request.path.startswith("/v1"):
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            known = [hmac.compare_digest(token.encode(), key.encode()) for key in face.api_keys]
            if scheme.lower() != "bearer" or not any(known):
                return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except BadRequestError as bad:
            return web.json_response(bad.body, status=bad.status)
        except EngineDeadError:
            return web.json_response(_dead(), status=500)

    async def log_access(request: web.Request, response: web.StreamResponse) -> None:
        peer = request.transport.get_extra_info("peername") if request.transport else None
        client = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""
        phrase = HTTPStatus(response.status).phrase
        line = f'{client} - "{request.method} {request.path_qs} HTTP/1.1" {response.status} {phrase}'
        face.console.uvicorn(line, access=True)

    api = _Api(face)
    app = web.Application(middlewares=[guard], client_max_size=64 << 20)
    if face.access_log:
        app.on_response_prepare.append(log_access)
    app.router.add_get("/health", api.health)
    app.router.add_route("*", "/ping", api.health)
    app.router.add_get("/metrics", api.metrics)
    app.router.add_get("/version", api.version)
    app.router.add_get("/load", api.load)
    app.router.add_get("/v1/models", api.models)
    app.router.add_post("/v1/completions", api.completions)
    app.router.add_post("/v1/chat/completions", api.chat)
    return app


class _Api:
    def __init__(self, face: Face) -> None:
        self.face = face

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self.face.client.died.is_set() else 200)

    async def metrics(self, _request: web.Request) -> web.Response:
        page = self.face.client.metrics
        body = b"" if page is None else page.render()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": texts.VERSION})

    async def load(self, _request: web.Request) -> web.Response:
        return web.json_response({"server_load": 0})

    async def models(self, _request: web.Request) -> web.Response:
        face, now = self.face, int(time.time())
        shared = {"object": "model", "created": now, "owned_by": "vllm", "root": face.root, "parent": None}
        data = [{"id": name, **shared, "max_model_len": face.max_model_len, "permission": []} for name in face.served]
        return web.json_response({"object": "list", "data": data})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        prompt = _prompt_tokens(body.get("prompt"))
        wanted = self._max_tokens(body, prompt, min(16, self.face.max_model_len - prompt), "max_tokens")
        return await self._answer(request, body, prompt, wanted, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequestError("'messages' must be a non-empty list", "messages")
        prompt = sum(8 + _prompt_tokens(_content(message)) for message in messages)
        given = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        wanted = self._max_tokens(body, prompt, min(_CHAT_DEFAULT, self.face.max_model_len - prompt), given)
        return await self._answer(request, body, prompt, wanted, chat=True)

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = await request.json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BadRequestError(
                f"1 validation error:\n  {{'type': 'json_invalid', 'msg': '{error}'}}", "body"
            ) from None
        if not isinstance(body, dict):
            raise BadRequestError("1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body'}", "body")
        model = body.get("model")
        if model is not None and model not in self.face.served:
            text = f"The model `{model}` does not exist. Valid aliases: {', '.join(self.face.served)}."
            raise BadRequestError(text, "model", "NotFoundError", 404)
        return body

    def _max_tokens(self, body: dict[str, Any], prompt: int, default: int, key: str) -> int:
        limit = self.face.max_model_len
        if prompt >= limit:
            raise BadRequestError(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains at least "
                f"{prompt} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
                f"length of the input prompt. (parameter=input_tokens, value={prompt})",
                "input_tokens",
            )
        wanted = body.get(key)
        if wanted is None:
            return default
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            raise BadRequestError(f"{key} must be at least 1, got {wanted}. (parameter={key}, value={wanted})", key)
        if wanted > limit:
            raise BadRequestError(
                f"{key}={wanted} cannot be greater than max_model_len={limit}. Please request fewer output tokens. "
                f"(parameter={key}, value={wanted})",
                key,
            )
        if prompt + wanted > limit:
            raise BadRequestError(
                f"This model's maximum context length is {limit} tokens. However, you requested {wanted} output "
                f"tokens and your prompt contains {prompt} input tokens, for a total of {prompt + wanted} tokens. "
                f"Please reduce the length of the input prompt or the number of requested output tokens. "
                f"(parameter=input_tokens, value={prompt})",
                "input_tokens",
            )
        return wanted

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: int, wanted: int, chat: bool
    ) -> web.StreamResponse:
        kind = "chat.completion" if chat else "text_completion"
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex[:16]}",
            "object": kind,
            "created": int(time.time()),
            "model": body.get("model") or self.face.served[0],
        }
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + wanted, "completion_tokens": wanted}
        if body.get("stream") is True:
            return await self._stream(request, body, prompt, wanted, chat, head, usage)
        parts = [_token(number) async for number in self.face.client.generate(prompt, wanted)]
        text = "".join(parts)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        choice.update({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
        return web.json_response({**head, "choices": [choice], "usage": usage})

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        prompt: int,
        wanted: int,
        chat: bool,
        head: dict[str, Any],
        usage: dict[str, int],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        head = {**head, "object": "chat.completion.chunk"} if chat else head

        async def send(data: object) -> None:
            await response.write(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode())

        def chunk(text: str, finish: str | None) -> dict[str, Any]:
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
            choice.update({"delta": {"content": text}} if chat else {"text": text, "stop_reason": None})
            return {**head, "choices": [choice]}

        try:
            if chat:
                first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                await send({**head, "choices": [first]})
            async for number in self.face.client.generate(prompt, wanted):
                await send(chunk(_token(number), "length" if number == wanted else None))
            options = body.get("stream_options")
            if isinstance(options, dict) and options.get("include_usage") is True:
                await send({**head, "choices": [], "usage": usage})
        except EngineDeadError:
            trace = (
                HEADER,
                *frames(SERVER["stream"]),
                f"vllm.v1.engine.exceptions.EngineDeadError: {texts.ENGINE_DEAD}",
            )
            self.face.console.error("serving.py:495", "Error in completion stream generator.", *trace)
            await send(_dead())
        await send("[DONE]")
        await response.write_eof()
        return response


def _dead() -> dict[str, Any]:
    return {"error": {"message": texts.ENGINE_DEAD, "type": "InternalServerError", "param": None, "code": 500}}


def _token(number: int) -> str:
    return f" {_WORDS[(number - 1) % len(_WORDS)]}"


def _prompt_tokens(prompt: object) -> int:
    """Tokens of a prompt: the length of a list of token numbers, else about four characters each."""
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return len(prompt)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise BadRequestError("1 validation error:\n  {'type': 'string_type', 'loc': 'body.prompt'}", "prompt")
    return max(1, len(prompt) // 4)


def _content(message: object) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise BadRequestError("'content' of a message must be text", "messages")
    return content or " "
