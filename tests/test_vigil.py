"""The vigil over a living engine: one verdict as one fact, none about one that answers, sleeps or has no API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from supervisord_vllm import vigil
from supervisord_vllm.clock import SECOND_NS
from supervisord_vllm.core.facts import Fact, Stalled
from supervisord_vllm.core.progress import Answer
from supervisord_vllm.engine.metrics import EngineLoad
from supervisord_vllm.engine.probe import EngineClient, Served
from supervisord_vllm.vigil import Terms, Vigil

STUCK = EngineLoad(running=1, waiting=2, generation_tokens_total=40, prompt_tokens_total=7, request_success_total=3)
PATIENT_S = 30.0


class Client(EngineClient):  # type: ignore[misc]  # final for users; here it stands for an engine's answers
    """An engine that answers a canary always alike."""

    def __init__(self, answer: Answer, load: EngineLoad = STUCK) -> None:
        self.answer, self.load, self.asked = answer, load, 0

    async def heartbeat(self, served: Served, seconds: float) -> Answer:
        self.asked += 1
        return self.answer

    async def metrics(self) -> EngineLoad | None:
        return self.load


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil, "LOOK_S", 0.01)


def watch(
    client: Client, until: Callable[[list[Fact]], bool], feed: EngineLoad | None = STUCK, **terms: object
) -> list[Fact]:
    """What a vigil over a healthy engine posts until a condition holds."""
    posted: list[Fact] = []

    async def run() -> None:
        given: dict[str, object] = {"launch": 7, "served": "auto", "start_ns": SECOND_NS, "hang_ns": SECOND_NS // 10}
        watcher = Vigil(Terms(**{**given, **terms}), client, posted.append, frozenset)  # type: ignore[arg-type]
        watcher.healthy(None)
        task = asyncio.get_running_loop().create_task(watcher.watch())
        deadline = asyncio.get_running_loop().time() + PATIENT_S
        while not until(posted):
            assert asyncio.get_running_loop().time() < deadline, f"asked {client.asked} times, posted {posted}"
            if feed is not None:
                watcher.loaded(feed)
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(run())
    return posted


def test_silence_and_frozen_counters_are_one_fact() -> None:
    (fact,) = watch(Client("silent"), bool)
    assert isinstance(fact, Stalled)
    assert (fact.what, fact.launch) == ("hung", 7)
    assert "3 requests ran or waited" in fact.text


@pytest.mark.parametrize("answer", ["answered", "refused", "asleep"])
def test_an_engine_that_answers_in_any_way_is_not_hung(answer: Answer) -> None:
    client = Client(answer)
    assert watch(client, lambda posted: client.asked >= 3) == []


def test_an_engine_whose_metrics_say_that_it_sleeps_is_not_even_asked() -> None:
    client, looks = Client("silent"), 0

    def long_enough(posted: list[Fact]) -> bool:
        nonlocal looks
        looks += 1
        return looks > 50

    asleep = EngineLoad(running=1, generation_tokens_total=40, asleep=True)
    assert watch(client, long_enough, asleep) == []
    assert client.asked == 0


def test_an_engine_without_an_api_is_not_asked() -> None:
    client, looks = Client("silent"), 0

    def long_enough(posted: list[Fact]) -> bool:
        nonlocal looks
        looks += 1
        return looks > 50

    assert watch(client, long_enough, None, headless=True) == []
    assert client.asked == 0


def test_a_start_without_progress_is_one_fact_and_a_growing_cache_keeps_it_alive(tmp_path: Path) -> None:
    posted: list[Fact] = []

    async def run() -> None:
        terms = Terms(7, "auto", start_ns=SECOND_NS, caches=(tmp_path,))
        watcher = Vigil(terms, Client("silent"), posted.append, frozenset)
        task = asyncio.get_running_loop().create_task(watcher.watch())
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while loop.time() < begun + 3:
            watcher.line(b"same line 1234")
            (tmp_path / "blob").write_bytes(b"x" * int(1 + 1000 * (loop.time() - begun)))
            await asyncio.sleep(0.05)
        assert posted == [], "3 s of growth with a patience of 1 s"
        while not posted:
            assert loop.time() < begun + PATIENT_S
            watcher.line(b"same line 1234")
            await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(run())
    (fact,) = posted
    assert isinstance(fact, Stalled)
    assert fact.what == "wedged"


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ({"/v1/completions": "answer"}, "answered"),
        ({"/v1/completions": 503}, "answered"),
        ({"/v1/completions": 500}, "answered"),
        ({"/v1/completions": "never"}, "silent"),
        ({"/v1/models": "never"}, "silent"),
        ({"/is_sleeping": {"is_sleeping": True}, "/v1/completions": "never"}, "asleep"),
        ({"/is_paused": {"is_paused": True}, "/v1/completions": "never"}, "asleep"),
        ({"/is_sleeping": {"is_sleeping": False}, "/v1/completions": "never"}, "silent"),
    ],
)
def test_only_silence_is_silence(paths: dict[str, object], expected: str) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        answer = paths.get(request.path)
        if answer == "never":
            await asyncio.sleep(600)
        if isinstance(answer, int):
            return web.json_response({"error": "no"}, status=answer)
        if answer == "answer":
            return web.json_response({"choices": [{"text": "a"}]})
        if answer is None and request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        return web.json_response(answer or {}, status=200 if answer else 404)

    async def ask() -> str:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
                return await client.heartbeat("auto", 0.5)
        finally:
            await runner.cleanup()

    assert asyncio.run(ask()) == expected


def test_a_refused_connection_is_not_silence() -> None:
    async def ask() -> str:
        async with EngineClient("http://127.0.0.1:9") as client:
            return await client.heartbeat("auto", 5.0)

    assert asyncio.run(ask()) == "refused"
