"""Pressure on real vLLM: which resource binds is read from its own /metrics, and more slots serve more."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from real.policies import policy
from real.sandbox import START, Json, Sandbox
from real.vllm_cpu.install import VllmCpu
from real.waiting import until

pytestmark = pytest.mark.real

CLIENTS = 8
PRESSURE = '\n[pressure]\nttft-p95 = "500ms"\nfirst-restart-cost = "5s"\n[poll]\nmetrics = "1s"\n'
SLOW = {"VLLMTEST_STEP_MS": "20"}
"""Steps take as long whatever is in them, as on a card that is far from full."""
TINY_KV = ("--kv-cache-memory-bytes", "1048576", "--block-size", "32", "--no-enable-prefix-caching")
"""1,024 tokens: three of the requests fit."""
COST = 2 * START
"""Seconds. Slowness has to cost as much as a restart first, and this engine's start sets that price."""


class Clients:
    """So many clients that each wait for their answer before they ask again, while the supervisor says ready."""

    def __init__(self, box: Sandbox, tokens: int) -> None:
        self.done: list[float] = []
        self._box, self._tokens = box, tokens
        self._over = threading.Event()
        self.threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                if self._ready():
                    self._box.engine.complete(max_tokens=self._tokens)
                    self.done.append(time.monotonic())
                    continue
            except (OSError, urllib.error.HTTPError, ValueError):
                pass
            self._over.wait(0.2)

    def _ready(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._box.ports[1]}/readyz", timeout=10) as answer:
            return bool(answer.status == 200)

    def rate(self, since: float) -> float:
        """Answers a second since a time of ``time.monotonic``."""
        return sum(at >= since for at in self.done) / (time.monotonic() - since)

    def stop(self) -> None:
        """Ask no more; what is under way ends with the engine."""
        self._over.set()


@contextmanager
def clients(box: Sandbox, tokens: int) -> Iterator[Clients]:
    """Clients for as long as the block lasts."""
    made = Clients(box, tokens)
    for thread in made.threads:
        thread.start()
    try:
        yield made
    finally:
        made.stop()


def pressed(box: Sandbox, vllm: VllmCpu, levers: Json, ladder: Sequence[Json], args: Sequence[str]) -> str:
    """A policy with a target."""
    return policy(box, vllm, levers=levers, ladder=ladder, args=args, env=SLOW) + PRESSURE


def decided(box: Sandbox) -> Json | None:
    """The first decision, once there is one."""
    decisions = box.history()["decisions"]
    return decisions[0] if decisions else None


def test_one_slot_under_load_is_named_raised_and_serves_more_afterwards(vllm: VllmCpu, box: Sandbox) -> None:
    levers = {"max-model-len": 1024, "max-num-seqs": 1}
    ladder = [{"lever": "max-num-seqs", "factor": 0.5, "min": 1, "max": CLIENTS}]
    box.start(pressed(box, vllm, levers, ladder, ("--kv-cache-memory-bytes", "64M")))
    box.wait_serving(1)
    with clients(box, 24) as load:
        began = time.monotonic()
        decision = until(lambda: decided(box), COST, lambda: f"a decision: {box.status()}", every=0.5)
        before = load.rate(began)
        assert decision is not None
        assert "bound by its number of sequences" in decision["sentence"]
        assert [(move["lever"], move["from"], move["to"]) for move in decision["moves"]] == [
            ("max_num_seqs", 1, CLIENTS)
        ]
        status = box.wait_serving(2, 2 * COST)
        assert status["launch"]["levers"]["max_num_seqs"] == CLIENTS
        again, answered = time.monotonic(), len(load.done)
        until(lambda: len(load.done) >= answered + 40, START, lambda: f"40 answers: {box.status()}")
        after = load.rate(again)
    assert after > 2 * before, f"{before:.2f} answers a second before, {after:.2f} after"


def test_preemptions_of_a_small_kv_cache_are_named_and_without_a_permission_nothing_is_restarted(
    vllm: VllmCpu, box: Sandbox
) -> None:
    levers = {"max-model-len": 512, "max-num-seqs": CLIENTS}
    box.start(pressed(box, vllm, levers, (), TINY_KV))
    box.wait_serving(1)
    with clients(box, 300):
        decision = until(lambda: decided(box), COST, lambda: f"a decision: {box.status()}", every=0.5)
        status = box.status()
    assert decision is not None
    assert "bound by its KV cache" in decision["sentence"]
    assert "No restart: " in decision["sentence"]
    assert "engines of this size" in decision["sentence"]
    assert decision["moves"] == []
    assert status is not None
    assert status["launch"]["number"] == 1
    assert status["load"]["preemptions_total"] > 0
    assert status["pressure"]["verdict"] == "kv"
