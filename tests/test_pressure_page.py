"""docs/pressure.md is true: its picture and its figures are what the daemon's rule makes of the captures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

from supervisord_vllm.core.facts import DeviceMemory, Verdict
from supervisord_vllm.core.ledger import Ledger
from supervisord_vllm.core.levers import Levers, Rung, show
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.pressure import sequences_held
from supervisord_vllm.core.relief import cures
from supervisord_vllm.core.state import Launch, State, StateName

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "pressure.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pressure_plot", ROOT / "scripts" / "pressure_plot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_what_the_rule_draws(plot: ModuleType) -> None:
    drawn = (ROOT / "docs" / "pressure.svg").read_text(encoding="utf-8")
    assert drawn == plot.drawing(plot.story()), "run: python scripts/pressure_plot.py"
    ET.fromstring(drawn)  # noqa: S314 - our own file
    assert "prefers-color-scheme: dark" in drawn


def test_the_words_beside_the_picture_are_its_figures(plot: ModuleType) -> None:
    told = plot.story()
    words = " ".join(PAGE.split())
    lost = told.lost[-1][1]
    assert (
        f"After {told.decided_s - plot.LOAD_S:.0f} s that has cost as much as a restart, C = {plot.COST_S} s" in words
    )
    assert f"{lost + plot.COST_S:.0f} s in all, against {plot.COST_S:.0f} s if one had known" in words
    assert f"{told.loss_before * (plot.END_S - plot.LOAD_S):.0f} s by the end of the picture" in words
    assert f"gone away before {told.decided_s:.0f} s" in words
    assert lost + plot.COST_S <= 2 * plot.COST_S + plot.PAGE_S * told.loss_before  # 1 + 2^0 times the best, and a page


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_worked_example_is_what_the_rule_makes_of_the_captures(plot: ModuleType, number: int) -> None:
    assert plot.example(*plot.EXAMPLES[number]) in PAGE, "run: python scripts/pressure_plot.py"


def test_the_changes_of_the_worked_example_are_those_of_the_rule() -> None:
    gib = 1 << 30
    card = DeviceMemory("GPU-1", int(139.8 * gib), int(139.8 * gib), 0, 0)
    policy = Policy(
        name="qwen", ladder=(Rung("gpu_memory_utilization", min=100, max=950), Rung("max_num_seqs", min=4, max=256))
    )
    words = " ".join(PAGE.split())
    cases: tuple[tuple[Verdict, int, str], ...] = (
        ("slot", 24, "`max_num_seqs` 24 → 73"),
        ("kv", 256, "utilization 0.135 → 0.193; `max_num_seqs` stays"),
    )
    for verdict, sequences, said in cases:
        levers = Levers({"gpu_memory_utilization": 135, "max_num_seqs": sequences})
        ledger = Ledger({"available_kv_gib": 3.21, "kv_tokens": 60_128})
        launch = Launch(1, levers, levers, 0, gate_devices=(card,), ledger=ledger)
        held = sequences_held(60_128, 814)
        found = cures(policy, State(name=StateName.SERVING, launch=launch), held, 10**12)
        shown = [
            f"{'utilization' if move.lever == 'gpu_memory_utilization' else f'`{move.lever}`'}"
            f" {show(move.lever, move.before)} → {show(move.lever, move.after)}"
            for move in found[verdict]
        ]
        assert [one for one in shown if one in said] == shown, (shown, said)
        assert said in words
