"""Questions to an engine: every way in which it can answer, or not, is an answer; nothing raises, nothing grows."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from supervisord_vllm.engine.metrics import EngineLoad, NoPage
from supervisord_vllm.engine.probe import LARGEST_REPLY, NO_ANSWER, EngineClient

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MODELS = {"data": [{"id": "adapter", "parent": "tiny"}, {"id": "tiny", "parent": None}]}
COMPLETION = {"choices": [{"text": "x"}]}


class Engine:
    """A server that answers as it is told and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {"/health": (200, None), "/v1/models": (200, MODELS)}
        self.key: str | None = None
        self.root = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path[len(self.root) :] if request.path.startswith(self.root) else ""
        self.asked.append((path, await request.json() if request.can_read_body else None))
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        status, body = self.answers.get(path, (404, {"detail": "Not Found"}))
        if callable(body):
            return await body(request)  # type: ignore[no-any-return]
        if isinstance(body, str):
            return web.Response(status=status, text=body)
        return web.json_response(body, status=status)


@asynccontextmanager
async def serving(engine: Engine, *, unix: Path | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", engine.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site: web.BaseSite
    site = web.UnixSite(runner, unix) if unix else web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"unix:{unix}" if unix else f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def ask(engine: Engine, question: Callable[[EngineClient], Awaitable[Any]], **options: Any) -> Any:  # noqa: ANN401
    async def run() -> Any:  # noqa: ANN401
        async with serving(engine) as url, EngineClient(url + engine.root, **options) as client:
            return await question(client)

    return asyncio.run(run())


@pytest.mark.parametrize("status", [200, 500, 503])
def test_health_is_the_status(status: int) -> None:
    engine = Engine()
    engine.answers["/health"] = (status, "")
    assert ask(engine, lambda client: client.health()) == status


def test_no_answer_is_none_for_every_question_and_the_canary_says_why() -> None:
    async def run() -> None:
        async with serving(Engine()) as url:
            pass
        async with EngineClient(url) as client:  # refused: nobody listens any more
            assert await client.health() is None
            assert await client.metrics() is None
            assert await client.served_model() is None
            refused = await client.canary()
            assert not refused.ok
            assert "Connect" in refused.detail

    asyncio.run(run())


def test_a_silent_engine_costs_its_time_out_and_no_more() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    engine = Engine()
    engine.answers["/health"] = (200, silent)
    engine.answers["/v1/completions"] = (200, silent)
    assert ask(engine, lambda client: client.health(), timeout=0.1) == NO_ANSWER
    result = ask(engine, lambda client: client.canary(), canary_timeout=0.3)
    assert not result.ok
    assert result.detail == "no answer within 0.3 s"
    assert 0.2 < result.seconds < 20


def test_metrics_are_read_and_no_page_is_none() -> None:
    engine = Engine()
    engine.answers["/metrics"] = (200, "vllm:num_requests_running 3.0\n")
    assert ask(engine, lambda client: client.metrics()) == EngineLoad(running=3, engines=1)
    engine.answers["/metrics"] = (404, "vllm:num_requests_running 3.0\n")
    assert ask(engine, lambda client: client.metrics()) is None
    missing = ask(engine, lambda client: client.page())
    assert isinstance(missing, NoPage)
    assert missing.why == "status"


def test_a_page_that_does_not_come_in_time_is_slow() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    engine = Engine()
    engine.answers["/metrics"] = (200, silent)
    missing = ask(engine, lambda client: client.page(), timeout=0.1)
    assert isinstance(missing, NoPage)
    assert missing.why == "slow"
    assert 0.05 < missing.seconds < 20


def test_a_reply_without_end_is_cut() -> None:
    sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while sent < 64 * LARGEST_REPLY:
            await response.write(b"x" * 65536)
            sent += 65536
        return response

    engine = Engine()
    engine.answers["/metrics"] = (200, flood)
    assert ask(engine, lambda client: client.metrics(), timeout=60) is None
    assert LARGEST_REPLY <= sent < 32 * LARGEST_REPLY


def test_a_redirect_is_not_followed() -> None:
    engine = Engine()

    async def away(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/v1/models")

    engine.answers["/health"] = (200, away)
    assert ask(engine, lambda client: client.health()) == 302
    assert [path for path, _ in engine.asked] == ["/health"]


def test_the_canary_asks_the_base_model_for_one_token() -> None:
    engine = Engine()
    engine.answers["/v1/completions"] = (200, COMPLETION)
    result = ask(engine, lambda client: client.canary())
    assert (result.ok, result.detail) == (True, "/v1/completions")
    body = engine.asked[-1][1]
    assert (body["model"], body["max_tokens"]) == ("tiny", 1)


@pytest.mark.parametrize(
    ("statuses", "answered"),
    [
        ({"/v1/completions": 404, "/v1/chat/completions": 200}, "/v1/chat/completions"),
        ({"/v1/completions": 400, "/v1/chat/completions": 400, "/v1/embeddings": 200}, "/v1/embeddings"),
        ({"/v1/completions": 404, "/v1/embeddings": 400, "/v1/score": 200}, "/v1/score"),
    ],
)
def test_the_canary_goes_through_what_the_engine_serves_and_remembers_it(
    statuses: dict[str, int], answered: str
) -> None:
    engine = Engine()
    for path, status in statuses.items():
        good = COMPLETION if "completions" in path else {"data": [{"embedding": [0.1], "score": 0.5}]}
        engine.answers[path] = (status, good if status == 200 else {"error": {"message": "not supported"}})

    async def twice(client: EngineClient) -> None:
        assert (await client.canary()).detail == answered
        engine.asked.clear()
        assert (await client.canary()).ok
        assert [path for path, _ in engine.asked] == ["/v1/models", answered]

    ask(engine, twice)


def test_a_client_that_asked_for_nothing_yet_learns_what_the_engine_serves() -> None:
    engine = Engine()
    engine.answers["/v1/embeddings"] = (200, {"data": [{"embedding": [0.1]}]})
    endpoint, model = ask(engine, lambda client: client.endpoint("auto", 5))
    assert (endpoint, model.name, model.max_model_len) == ("embeddings", "tiny", None)
    assert ask(engine, lambda client: client.endpoint("chat", 5))[0] == "chat"


def test_the_canary_is_streamed_and_its_first_token_is_timed() -> None:
    async def late(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n'
        await response.write(role)  # no token yet
        await asyncio.sleep(0.2)
        for piece in (b'data: {"choices": [{"delta": {"content": "x"}, "fini', b'sh_reason": "length"}]}\n', b"\n"):
            await response.write(piece)
        await asyncio.sleep(0.2)
        await response.write(b"data: [DONE]\n\n")
        return response

    engine = Engine()
    engine.answers["/v1/chat/completions"] = (200, late)
    result = ask(engine, lambda client: client.canary("chat"))
    assert engine.asked[-1][1]["stream"] is True
    assert result.ok
    assert result.first_token_s is not None
    assert 0.15 < result.first_token_s < result.seconds - 0.15


def test_a_stream_that_ends_in_an_error_is_no_answer() -> None:
    async def dying(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    engine = Engine()
    engine.answers["/v1/completions"] = (200, dying)
    result = ask(engine, lambda client: client.canary())
    assert (result.ok, result.detail) == (False, "/v1/completions: 500 EngineCore encountered an issue.")
    assert engine.asked[-1][0] == "/v1/completions", "nothing else is tried on a dying engine"


@pytest.mark.parametrize(
    ("path", "status", "body", "detail"),
    [
        (
            "/v1/completions",
            500,
            {"error": {"message": "EngineCore encountered an issue."}},
            "500 EngineCore encountered",
        ),
        ("/v1/completions", 503, {"error": {"message": "paused"}}, "/v1/completions: 503 paused"),
        ("/v1/completions", 200, {"choices": []}, "200 without a result"),
        ("/v1/completions", 200, "[[[[", "200 without a result"),
        ("/v1/completions", 404, {"detail": "Not Found"}, "/v1/score: 404 Not Found"),
        ("/v1/models", 200, {"data": []}, "/v1/models: 200"),
        ("/v1/models", 200, {"data": ["tiny", {"id": 7}]}, "/v1/models: 200"),
        ("/v1/models", 500, "oops", "/v1/models: 500"),
    ],
)
def test_a_failed_canary_says_where_and_why(path: str, status: int, body: object, detail: str) -> None:
    engine = Engine()
    engine.answers[path] = (status, body)
    result = ask(engine, lambda client: client.canary())
    assert not result.ok
    assert detail in result.detail
    if status >= 500:  # a server error is not an endpoint that does not suit: nothing else is tried
        assert engine.asked[-1][0] == path


def test_a_message_of_any_length_is_cut() -> None:
    engine = Engine()
    engine.answers["/v1/completions"] = (500, {"error": {"message": "x" * 100_000}})
    assert len(ask(engine, lambda client: client.canary()).detail) <= 300


def test_the_api_key_is_sent_and_a_wrong_one_is_said() -> None:
    engine = Engine()
    engine.key = "sesame"
    engine.answers["/v1/completions"] = (200, COMPLETION)
    assert ask(engine, lambda client: client.canary(), api_key="sesame").ok
    refused = ask(engine, lambda client: client.canary(), api_key="wrong")
    assert refused.detail == "/v1/models: 401, the API key was refused"


def test_a_root_path_and_a_unix_socket_are_reached(tmp_path: Path) -> None:
    engine = Engine()
    engine.root = "/llm"
    assert ask(engine, lambda client: client.served_model()) == "tiny"

    async def over_unix() -> None:
        async with (
            serving(engine, unix=tmp_path / "engine.sock") as url,
            EngineClient(url, root="/llm") as client,
        ):
            assert await client.health() == 200

    asyncio.run(over_unix())


def test_tls_is_verified_unless_said_otherwise(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *request.split(), *files], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def run() -> None:
        async with serving(Engine(), tls=context) as url:
            async with EngineClient(url) as strict:
                assert await strict.health() is None
            async with EngineClient(url, ca_file=certificate) as trusting:
                assert await trusting.health() == 200
            async with EngineClient(url, verify=False) as careless:
                assert await careless.health() == 200

    asyncio.run(run())
