"""The burst of a proof: everything must be answered, nothing of it may be in a user's way, and it always ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from daemon_process import free_port
from supervisord_vllm.engine.probe import EngineClient
from supervisord_vllm.engine.proof import Burst, BurstOrder, BurstResult, fitted, prompt

PATIENCE_S = 30.0
Reaction = Callable[["Server", web.Request, dict[str, Any]], Awaitable[web.StreamResponse | None]]


class Server:
    """An engine of 4 slots that streams as vLLM does; ``real`` is traffic that is not ours, as (running, waiting)."""

    def __init__(self, reaction: Reaction | None = None, length: int | None = 4096) -> None:
        self.reaction = reaction
        self.length = length
        self.asked: list[dict[str, Any]] = []
        self.flying = self.most = self.finished = self.broken = 0
        self.real = (0, 0)
        self.statistics = True

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny", "max_model_len": self.length}]})
        if request.path == "/metrics":
            running, waiting = self.real[0] + min(4, self.flying), self.real[1] + max(0, self.flying - 4)
            page = (
                f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"
                f"vllm:request_success_total {self.finished}\n"
            )
            return web.Response(text=page if self.statistics else "")
        body = await request.json()
        self.asked.append(body)
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            if self.reaction is not None and body["max_tokens"] > 1:  # the canary is fine
                said = await self.reaction(self, request, body)
                if said is not None:
                    return said
            return await stream(request, body["max_tokens"])
        except asyncio.CancelledError:
            self.broken += 1
            raise
        finally:
            self.flying -= 1
            self.finished += 1


async def stream(request: web.Request, tokens: int, *last: object, pause: float = 0.0) -> web.StreamResponse:
    """A completion of so many tokens, then ``last`` instead of its orderly end."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for number in range(tokens):
        await asyncio.sleep(pause)
        done = "length" if number == tokens - 1 and not last else None
        chunk = {"choices": [{"index": 0, "text": "", "finish_reason": done}]}
        chunk["choices"][0]["text"] = "x"
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    for data in last or ("[DONE]",):
        await response.write(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode())
    return response


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[EngineClient]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            assert (await client.canary()).ok
            server.asked.clear()
            server.finished = server.most = 0
            yield client
    finally:
        await runner.cleanup()


def carried_out(server: Server, *, requests: int = 8, deadline_s: float = PATIENCE_S) -> BurstResult:
    async def run() -> BurstResult:
        async with serving(server) as client:
            order = BurstOrder(requests, 64, 3, deadline_s)
            return await asyncio.wait_for(Burst(client, order).run(), PATIENCE_S)

    return asyncio.run(run())


async def eventually(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 - what is awaited is a server's own count
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), PATIENCE_S)


async def all_at_once(server: Server, request: web.Request, body: dict[str, Any]) -> None:
    await eventually(lambda: len(server.asked) >= 8)


def test_all_requests_are_in_the_engine_at_once_and_no_prompt_begins_like_another() -> None:
    server = Server(all_at_once)
    result = carried_out(server)
    assert (result.ok, result.answered, result.failed, result.detail) == (True, 8, 0, "")
    assert server.most == 8
    assert len({body["prompt"].split()[0] for body in server.asked}) == 8
    assert {(body["max_tokens"], body["ignore_eos"], body["stream"]) for body in server.asked} == {(3, True, True)}
    assert result.first_token_s is not None
    assert 0 < result.first_token_s <= result.seconds


def test_a_large_burst_is_at_once_too_and_keeps_no_health_check_waiting() -> None:
    async def run() -> tuple[BurstResult, int | None]:
        async def together(server: Server, request: web.Request, body: dict[str, Any]) -> None:
            await eventually(lambda: len(server.asked) >= 120 and checked.is_set())

        server, checked = Server(together), asyncio.Event()
        async with serving(server) as client:
            burst = asyncio.ensure_future(Burst(client, BurstOrder(120, 16, 2, PATIENCE_S)).run())
            await eventually(lambda: server.flying == 120)
            status = await client.health()
            checked.set()
            return await asyncio.wait_for(burst, PATIENCE_S), status

    result, status = asyncio.run(run())
    assert (result.answered, status) == (120, 200)


@pytest.mark.parametrize(
    ("length", "expected"), [(None, (2048, 64)), (8192, (2048, 64)), (512, (192, 64)), (64, (1, 16)), (1, (1, 1))]
)
def test_the_lengths_fit_any_model(length: int | None, expected: tuple[int, int]) -> None:
    assert fitted(BurstOrder(1, 2048, 64, 1), length) == expected
    assert len(prompt(7, expected[0]).split()) == expected[0]


def test_failed_requests_are_counted_and_the_first_reason_is_kept() -> None:
    async def fail_third(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        await all_at_once(server, request, body)
        if body["prompt"].split()[0] in ("3", "5"):
            return web.json_response({"error": {"message": "EngineCore encountered an issue."}}, status=500)
        return None

    result = carried_out(Server(fail_third))
    assert (result.ok, result.failed) == (False, 2)
    assert result.answered <= 6
    assert result.detail == "500 EngineCore encountered an issue."


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (({"error": {"message": "EngineCore encountered an issue.", "code": 500}}, "[DONE]"), "500 EngineCore"),
        (({"choices": []},), "the stream broke off"),
    ],
)
def test_a_stream_that_ends_in_an_error_or_breaks_off_is_a_failure_although_its_status_is_200(
    last: tuple[object, ...], reason: str
) -> None:
    async def broken(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, 1, *last)

    result = carried_out(Server(broken))
    assert not result.ok
    assert result.failed == 8
    assert reason in result.detail


@pytest.mark.parametrize("status", [429, 503])
def test_what_the_engines_own_queue_limit_turns_away_is_no_failure(status: int) -> None:
    async def full(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        if server.flying <= 4:
            await eventually(lambda: len(server.asked) >= 8)
            return None
        busy = {"error": {"message": "The engine is currently busy and cannot accept new requests."}}
        return web.json_response(busy, status=status)

    result = carried_out(Server(full))
    assert (result.ok, result.answered, result.refused, result.failed) == (True, 4, 4, 0)
    assert "currently busy" in result.detail


def test_a_prompt_that_is_too_long_is_shortened_until_it_fits() -> None:
    async def short_only(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        if len(body["prompt"].split()) > 20:
            return web.json_response({"error": {"message": "maximum context length"}}, status=400)
        return None

    server = Server(short_only, length=None)
    result = carried_out(server)
    assert (result.ok, result.answered) == (True, 8)
    assert {len(body["prompt"].split()) for body in server.asked[-4:]} == {16}


def test_a_request_that_never_suits_says_so_and_does_not_fail_the_engine() -> None:
    async def no(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        return web.json_response({"message": "not so"}, status=400)

    result = carried_out(Server(no))
    assert (result.ok, result.refused, result.answered) == (True, 8, 0)
    assert result.detail == "400 not so"


def test_real_traffic_makes_the_burst_smaller_by_as_much() -> None:
    server = Server()
    server.real = (6, 0)
    result = carried_out(server)
    assert (result.ok, result.answered) == (True, 8)
    assert server.most <= 2


def test_where_a_user_waits_the_whole_burst_is_withdrawn_at_once_and_goes_on_later() -> None:
    async def run() -> BurstResult:
        gate = asyncio.Event()

        async def held(server: Server, request: web.Request, body: dict[str, Any]) -> None:
            await gate.wait()

        server = Server(held)
        async with serving(server) as client:
            burst = Burst(client, BurstOrder(8, 64, 3, PATIENCE_S))
            running = asyncio.ensure_future(burst.run())
            await eventually(lambda: server.flying == 8)
            server.real = (1, 1)
            await eventually(lambda: server.flying == 0)
            assert burst.yields
            assert server.broken == 8
            sent = len(server.asked)
            await asyncio.sleep(0.8)  # three looks: nothing may come back while the user is there
            assert len(server.asked) == sent
            server.real = (0, 0)
            gate.set()
            return await asyncio.wait_for(running, PATIENCE_S)

    result = asyncio.run(run())
    assert (result.ok, result.answered, result.failed) == (True, 8, 0)


def test_real_traffic_that_succeeds_counts_in_the_bursts_place() -> None:
    async def run() -> BurstResult:
        server = Server()
        server.real = (8, 3)
        async with serving(server) as client:
            burst = Burst(client, BurstOrder(8, 64, 3, PATIENCE_S))
            running = asyncio.ensure_future(burst.run())
            await eventually(lambda: burst.yields)
            await asyncio.sleep(0.6)
            assert server.asked == []
            server.finished += 8
            return await asyncio.wait_for(running, PATIENCE_S)

    result = asyncio.run(run())
    assert (result.ok, result.answered, result.real) == (True, 0, 8)


def test_traffic_that_never_ends_does_not_keep_a_proof_for_ever() -> None:
    server = Server()
    server.real = (8, 8)
    result = carried_out(server, deadline_s=1.0)
    assert (result.ok, result.silent, result.answered) == (True, False, 0)
    assert result.detail == "0 of 8 were answered in time: the rest gave way to real traffic"


def test_an_engine_without_statistics_gets_the_whole_burst() -> None:
    server = Server(all_at_once)
    server.statistics = False
    assert carried_out(server).answered == 8


def test_slow_is_not_failed_but_silence_is() -> None:
    async def slow(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        return await stream(request, 100, pause=0.1)

    result = carried_out(Server(slow), deadline_s=1.0)
    assert (result.ok, result.detail) == (True, "0 of 8 were answered in time: it is slow")

    async def silent(server: Server, request: web.Request, body: dict[str, Any]) -> None:
        await asyncio.sleep(PATIENCE_S)

    result = carried_out(Server(silent), deadline_s=1.0)
    assert (result.ok, result.silent) == (False, True)


def test_a_cancelled_burst_leaves_no_request_behind() -> None:
    async def run() -> Server:
        async def held(server: Server, request: web.Request, body: dict[str, Any]) -> None:
            await asyncio.sleep(PATIENCE_S)

        server = Server(held)
        async with serving(server) as client:
            running = asyncio.ensure_future(Burst(client, BurstOrder(8, 64, 3, PATIENCE_S)).run())
            await eventually(lambda: server.flying == 8)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await eventually(lambda: server.flying == 0)
        return server

    assert asyncio.run(run()).broken == 8


def test_an_engine_that_is_gone_fails_the_burst() -> None:
    async def run() -> BurstResult:
        async with EngineClient(f"http://127.0.0.1:{free_port()}") as gone:
            return await asyncio.wait_for(Burst(gone, BurstOrder(8, 64, 3, 0.5)).run(), PATIENCE_S)

    result = asyncio.run(run())
    assert (result.ok, result.failed, result.detail) == (False, 8, "/v1/models gave no answer")
