"""Rehearsal: the real core on the simulated card; scenarios, stories, JSON, days, and the two ways to sample."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import simulated_days
from supervisord_vllm.cli.main import app
from supervisord_vllm.config import load
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.diagram import page
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.rehearsal.play import Play
from supervisord_vllm.rehearsal.story import comparison, document, story
from supervisord_vllm.simulation.card import CardError
from supervisord_vllm.simulation.virtual_scenario import packaged, parse_scenario, read_scenario

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "config.example.toml"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load(EXAMPLE, environ={"HOME": "/"}).policy


def played(policy: Policy, name: str) -> Play:
    play = Play(policy, read_scenario(name)).run()
    simulated_days.check(play)
    return play


ENDS = {
    "bad-flag": ("given-up", 1),
    "broken-card": ("given-up", 1),
    "burst-oom": ("serving", 2),
    "calm": ("serving", 1),
    "capture-oom": ("serving", 3),
    "corrupt-cache": ("serving", 2),
    "crash-loop": ("given-up", 3),
    "first-request": ("given-up", 3),
    "full-ladder": ("given-up", 9),
    "hang": ("serving", 2),
    "held": ("serving", 3),
    "hub-outage": ("serving", 3),
    "lying-health": ("serving", 2),
    "neighbour-at-start": ("serving", 2),
    "neighbour-grows": ("serving", 2),
    "neighbour-in-profile": ("serving", 2),
    "neighbour-leaves": ("serving", 1),
    "no-kv-room": ("serving", 2),
    "orphan": ("serving", 2),
    "out-of-memory": ("serving", 3),
    "silent-death": ("serving", 3),
    "slow-start": ("serving", 1),
    "too-large": ("serving", 2),
    "too-many-clients": ("serving", 2),
    "wedged-start": ("serving", 2),
}


def test_there_are_at_least_fourteen_scenarios_and_each_has_a_title() -> None:
    assert len(packaged()) >= 14
    titles = [read_scenario(name).title for name in packaged()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", packaged())
def test_every_scenario_ends_as_an_operator_would_want_it(policy: Policy, name: str) -> None:
    play = played(policy, name)
    end = ENDS.get(name)
    if end is not None:
        assert (play.state.name.value, len(play.launches)) == end, story(play)
    text = story(play)
    assert all(len(line) <= 200 for line in text.splitlines())
    assert document(play)["final"]["state"] == play.state.name.value
    json.dumps(document(play))


def test_the_full_ladder_is_walked_in_the_order_of_the_mission(policy: Policy) -> None:
    play = played(policy, "full-ladder")
    levers = [launch.levers for launch in play.launches]
    utilizations = [one.number("gpu_memory_utilization") or 0 for one in levers]
    assert utilizations[0] == 900
    floor = utilizations.index(700)
    assert sorted(utilizations[: floor + 1], reverse=True) == utilizations[: floor + 1]
    shorter = next(n for n, one in enumerate(levers) if (one.number("max_model_len") or 0) < 8192)
    eager = next(n for n, one in enumerate(levers) if one.eager)
    other = next(n for n, one in enumerate(levers) if one["weights"] != policy.declared["weights"])
    assert 0 < floor < shorter < eager < other
    kinds = [judged.decision.kind for judged in play.decisions]
    assert [k for k in (Kind.KV_LEN_TOO_LONG, Kind.OOM_CUDAGRAPH, Kind.KV_NO_BLOCKS) if k in kinds] == [
        Kind.KV_LEN_TOO_LONG,
        Kind.OOM_CUDAGRAPH,
        Kind.KV_NO_BLOCKS,
    ]
    assert play.exit == 69
    assert play.given_up is not None
    assert "This card cannot run this model as the policy permits it. It lacks " in play.given_up
    assert "What would fit: " in play.given_up


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("first-request", "Its proof failed in the canary, its first request."),
        ("burst-oom", "Its proof failed in the burst: 16 of 16 requests failed"),
    ],
)
def test_the_story_names_the_part_of_the_proof_that_failed(policy: Policy, name: str, part: str) -> None:
    play = played(policy, name)
    assert part in play.decisions[0].decision.sentence
    assert play.launches[0].proven_s is None


def test_a_fault_of_many_requests_at_once_needs_a_burst_that_large(policy: Policy) -> None:
    small = replace(policy, declared=policy.declared.with_(max_num_seqs=8))
    assert played(small, "burst-oom").decisions == []


def test_the_story_says_every_decision_and_how_it_ended(policy: Policy) -> None:
    play = played(policy, "neighbour-grows")
    text = " ".join(story(play).split())
    for judged in play.decisions:
        assert judged.decision.sentence in text
    assert "End: serving" in text


def test_the_json_has_the_names_of_the_contract(policy: Policy) -> None:
    made = document(played(policy, "out-of-memory"))
    assert {"scenario", "timeline", "launches", "decisions", "downtime_s", "final"} <= set(made)
    assert {"at_s", "state", "what"} <= set(made["timeline"][0])
    assert {"state", "levers"} <= set(made["final"])
    decision = made["decisions"][0]
    assert {"number", "at_s", "launch", "kind", "action", "moves", "evidence", "arithmetic", "sentence", "next"} <= set(
        decision
    )
    assert decision["next"]["state"] == "gating"
    assert decision["moves"][0] == {
        "lever": "gpu_memory_utilization", "from": 0.9, "to": 0.85, "direction": "down", "how": "stepped",
    }  # fmt: skip
    assert made["launches"][1]["levers"]["gpu_memory_utilization"] == 0.85


def test_two_policies_are_compared_side_by_side(policy: Policy) -> None:
    from dataclasses import replace

    scenario = read_scenario("out-of-memory")
    other = replace(policy, ladder=())
    text = comparison(Play(policy, scenario).run(), Play(other, scenario).run(), ("mine", "other"))
    assert "given-up" in text
    assert "serving" in text


def run_cli(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["rehearse", *words])
    return result.exit_code, result.output


def test_the_command_lists_plays_compares_and_refuses() -> None:
    code, output = run_cli("--list", "--json")
    assert code == 0
    listed = json.loads(output)
    assert listed["schema"] == 1
    assert {"name", "title"} == set(listed["scenarios"][0])
    code, output = run_cli("--config", str(EXAMPLE), "--scenario", "calm", "--json")
    assert (code, json.loads(output)["final"]["state"]) == (0, "serving")
    code, output = run_cli("--config", str(EXAMPLE), "--scenario", "calm", "--against", str(EXAMPLE))
    assert code == 0
    assert "levers at the end" in output
    code, output = run_cli("--config", str(EXAMPLE), "--scenario", "nothing-like-it")
    assert code == 2
    assert "no scenario 'nothing-like-it'; known are" in output
    assert run_cli()[0] == 2


def test_a_scenario_of_ones_own_is_a_toml_file(policy: Policy, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('schema = 1\ntitle = "mine"\n[[fault]]\nkind = "die"\nat = "running"\nlaunch = 1\nafter = "60s"\n')
    play = Play(policy, read_scenario(str(own))).run()
    assert [launch.outcome for launch in play.launches] == ["engine_dead", "runs"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("title = 1", "schema = 1 must be set"),
        ('schema = 1\nduration = "soon"', "duration: a duration"),
        ('schema = 1\n[[neighbour]]\nat = "1s"', "[[neighbour]] 1 bytes: a size"),
        ('schema = 1\n[[operator]]\nat = "1s"\nverb = "dance"', "verb 'dance' is unknown"),
        ('schema = 1\n[[fault]]\nkind = "flood"', "kind 'flood' is unknown"),
        ("schema = 1\n[[load]]\nrate = -1", "rate: requests a second"),
        ("schema = 1\nweather = 1", "unknown key 'weather'"),
        ("schema = ", "no TOML"),
    ],
)
def test_a_wrong_scenario_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(CardError) as error:
        parse_scenario(text, "own", "own.toml", Path())
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", range(60))
def test_a_simulated_day_keeps_every_rule(seed: int) -> None:
    simulated_days.day(seed)


def test_the_days_are_worth_their_name() -> None:
    """Days that decide nothing would prove nothing."""
    days = [simulated_days.day(seed) for seed in range(20)]
    decisions = [judged.decision for day in days for judged in day.decisions]
    assert len(decisions) > 60
    assert len({decision.kind for decision in decisions}) >= 10
    assert {day.state.name.value for day in days} >= {"serving", "given-up"}


@pytest.mark.parametrize("seed", range(20))
def test_samples_at_one_hertz_lead_to_the_same_decisions_as_events(seed: int) -> None:
    def decided(play: Play) -> list[tuple[object, ...]]:
        return [(d.decision.kind, d.decision.action, d.decision.moves, d.decision.launch) for d in play.decisions]

    events, sampled = simulated_days.day(seed), simulated_days.day(seed, every_s=1.0)
    assert decided(events) == decided(sampled), f"{story(events)}\n\n{story(sampled)}"
    assert events.facts <= sampled.facts


def test_a_day_takes_well_under_half_a_second() -> None:
    """The goal is one of benchmarks/decide.py; here only that nothing is wrong by an order of magnitude."""
    began = time.process_time()
    simulated_days.day(3)
    assert time.process_time() - began < 5


def test_one_day_is_the_same_in_two_interpreters_with_other_hash_seeds() -> None:
    program = (
        "import json, simulated_days\nfrom supervisord_vllm.rehearsal.story import document\n"
        "print(json.dumps([document(simulated_days.day(seed)) for seed in (4, 11)]))"
    )
    outputs = []
    for hash_seed in ("1", "4242"):
        command = [sys.executable, "-c", program]
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "PATH": "/usr/bin:/bin"}
        outputs.append(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 1000


def test_the_page_of_the_states_is_what_the_table_says() -> None:
    shown = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    assert shown == page(), "run: python scripts/states.py"


def test_the_record_of_long_runs_is_read_back(tmp_path: Path) -> None:
    record = tmp_path / "long.md"
    record.write_text("| seeds | result |\n|---|---|\n| 0–499 | no violation |\n")
    assert simulated_days.done(record) == [(0, 499)]
    assert list(simulated_days.missing(record, 1500, 500)) == [(500, 999), (1000, 1499)]
