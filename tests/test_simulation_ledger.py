"""The simulator's ledger against the H200 captures: fitted ones, and three that were held out (03, 16, 32)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from simulated_engine import CAPTURES, LARGE, MODEL
from supervisord_vllm.simulation.arguments import parse
from supervisord_vllm.simulation.card import read_card
from supervisord_vllm.simulation.console import Console
from supervisord_vllm.simulation.ledger import (
    Ledger,
    Settings,
    account,
    default_capture_sizes,
    layer_pieces,
    suggestions,
    weight_pieces,
    weights_bytes,
)
from supervisord_vllm.simulation.quantity import GIB
from supervisord_vllm.simulation.resolve import resolve

FITTED = ("01", "02", "05", "06", "08", "24", "30", "31")
HELD_OUT = ("03", "16", "32")

TERMS = {
    "weights": r"Model loading took ([\d.]+) GiB",
    "kv": r"Available KV cache memory: (-?[\d.]+) GiB",
    "free": r"Free memory on device \(([\d.]+)/",
    "total": r"Free memory on device \([\d.]+/([\d.]+) GiB",
    "requested": r"Desired GPU memory utilization is \([\d.]+, ([\d.]+) GiB\)",
    "activation": r"([\d.]+) GiB for peak activation",
    "non_torch": r"([\d.]+) GiB for non-torch",
    "graphs": r"([\d.]+) GiB for CUDAGraph",
    "fits": r"`--kv-cache-memory=\d+` \(([\d.]+) GiB\) to fit",
    "fills": r"`--kv-cache-memory=\d+` \(([\d.]+) GiB\) to fully",
    "needed": r"\(([\d.]+) GiB KV cache is needed",
}
COUNTS = {
    "tokens": r"GPU KV cache size: ([\d,]+) tokens",
    "concurrency": r"tokens per request: ([\d.]+)x",
    "estimate": r"estimated maximum model length is (\d+)",
}


def capture(number: str) -> tuple[str, Path]:
    log = next(CAPTURES.glob(f"{number}-*.log"))
    return log.read_text(encoding="utf-8"), log.with_suffix(".json")


def settings_of(command: list[str]) -> Settings:
    """What the capture's own command line gives on our card."""
    card = read_card("h200")
    return resolve(card, card.models[MODEL], parse(["serve", MODEL, *command[3:]]), Console("test"))


def predicted(ledger: Ledger, length: int, free: int) -> dict[str, float]:
    fits, fills = suggestions(ledger, free)
    sizes = {
        "weights": ledger.weights,
        "kv": ledger.kv,
        "free": free,
        "total": ledger.total,
        "requested": ledger.requested,
        "activation": ledger.activation,
        "non_torch": ledger.non_torch,
        "graphs": ledger.graphs,
        "fits": fits,
        "fills": fills,
        "needed": ledger.needed(length),
    }
    counts = {
        "tokens": ledger.tokens(length),
        "concurrency": ledger.concurrency(length),
        "estimate": ledger.estimated_max_len(),
    }
    return {**{name: size / GIB for name, size in sizes.items()}, **counts}


@pytest.mark.parametrize("number", [*FITTED, *HELD_OUT])
def test_every_printed_term_is_within_two_percent_or_a_tenth_of_a_gib(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, command = capture(number)
    settings = settings_of(json.loads(command.read_text())["cmd"])
    card = read_card("h200")
    cold = "Compiling a graph for" in text
    ledger = account(card.device, card.models[MODEL], settings, cold)
    values = predicted(ledger, settings.max_model_len, card.device.usable - card.device.context)
    compared = 0
    for name, pattern in {**TERMS, **COUNTS}.items():
        for printed in set(re.findall(pattern, text)):
            real = float(printed.replace(",", ""))
            allowed = max(0.02 * abs(real), 0.1 if name in TERMS else 0.0)
            assert abs(values[name] - real) <= allowed, (number, name, values[name], real)
            compared += 1
    assert compared >= 2


def test_kv_cache_of_the_seed_configuration_is_exact_to_the_block() -> None:
    text, command = capture("01")
    card = read_card("h200")
    settings = settings_of(json.loads(command.read_text())["cmd"])
    cold = account(card.device, card.models[MODEL], settings, cold=True)
    warm = account(card.device, card.models[MODEL], settings, cold=False)
    assert f"{cold.tokens(8192):,}" in text
    assert round((warm.kv - cold.kv) / GIB, 2) == 0.06


def test_capture_sizes_follow_vllm() -> None:
    assert default_capture_sizes(16, 8192) == (1, 2, 4, 8, 16, 24, 32)
    assert len(default_capture_sizes(64, 32768)) == 19
    assert default_capture_sizes(1024, 8192)[-1] == 512
    assert default_capture_sizes(1024, 100)[-1] == 96


@pytest.mark.parametrize("method", [None, "fp8"])
@pytest.mark.parametrize("model", [MODEL, LARGE])
def test_the_pieces_of_the_weights_add_up(model: str, method: str | None) -> None:
    described = read_card("h200").models[model]
    assert sum(weight_pieces(described, method)) == weights_bytes(described, method)
    assert max(layer_pieces(described, "fp8")) * 2 == max(layer_pieces(described, None))


def test_a_neighbour_that_grows_while_profiling_is_charged_to_the_engine() -> None:
    card = read_card("h200")
    settings = Settings(0.9, 8192, 16, 8192, eager=True)
    alone = account(card.device, card.models[MODEL], settings, cold=False)
    beside = account(card.device, card.models[MODEL], settings, cold=False, foreign_growth=GIB)
    assert alone.kv - beside.kv == GIB
