"""Everything that is stored can be read again: the codec's round trip, and its tolerance towards a newer writer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisord_vllm.core import codec
from supervisord_vllm.core.codec import Json
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Action, Change, Diagnosis, Evidence, Kind
from supervisord_vllm.core.facts import FACTS, DaemonStarted, DeviceMemory, Diagnosed, ProcessRef, Spawned, Tick
from supervisord_vllm.core.levers import LEVERS, Levers, LeverValue, Rung, Weights
from supervisord_vllm.core.policy import Backoff, Gate, Override, Policy

settings.register_profile("codec", derandomize=True, deadline=None, max_examples=15)
QUICK = settings(settings.get_profile("codec"), suppress_health_check=[HealthCheck.too_slow])

texts = st.text(max_size=12)
ints = st.integers(min_value=-(2**62), max_value=2**62)
floats = st.floats(allow_nan=False, allow_infinity=False)
weights = st.builds(Weights, texts, st.none() | texts)


def value_of(name: str) -> st.SearchStrategy[Any]:
    return {
        "per_mille": st.integers(0, 1000),
        "int": st.integers(0, 10**9),
        "bool": st.booleans(),
        "str": texts,
        "weights": weights,
    }[LEVERS[name].kind]


levers = st.fixed_dictionaries({}, optional={name: value_of(name) for name in LEVERS}).map(Levers)


@st.composite
def moves(draw: st.DrawFn) -> Move:
    name = draw(st.sampled_from(sorted(LEVERS)))
    before: LeverValue | None = draw(st.none() | value_of(name))
    return Move(
        name,
        before,
        draw(value_of(name)),
        draw(st.sampled_from(["up", "down", "switch"])),
        draw(st.sampled_from(["computed", "stepped", "restored"])),
    )


st.register_type_strategy(str, texts)
st.register_type_strategy(int, ints)
st.register_type_strategy(float, floats)
st.register_type_strategy(Levers, levers)
st.register_type_strategy(Move, moves())
policies = st.builds(
    Policy,
    declared=levers,
    ladder=st.lists(st.builds(Rung, use=st.lists(weights | texts, max_size=2).map(tuple)), max_size=3).map(tuple),
    overrides=st.dictionaries(st.sampled_from(Kind), st.builds(Override), max_size=3),
)


def through_text(obj: object) -> Json:
    return codec.from_json(type(obj).__name__, json.loads(json.dumps(codec.to_json(obj))))


@pytest.mark.parametrize("cls", [*FACTS, Decision, Move, Diagnosis, DeviceMemory, ProcessRef, Levers])
def test_every_fact_and_verdict_survives_the_round_trip_through_json_text(cls: type[Any]) -> None:
    @QUICK
    @given(st.from_type(cls))
    def check(obj: Json) -> None:
        again = through_text(obj)
        assert again == obj
        assert type(again) is type(obj)

    check()


@QUICK
@given(policies)
def test_a_policy_survives_the_round_trip(policy: Policy) -> None:
    assert codec.policy_from_json(json.loads(json.dumps(codec.policy_to_json(policy)))) == policy


def test_types_inside_survive_and_not_only_equality() -> None:
    fact = Diagnosed(
        at_ns=1,
        launch=2,
        diagnosis=Diagnosis(
            Kind.OOM_RUNTIME,
            action=Action.NEXT_CONFIG,
            change=(Change("max_num_seqs", "down", 8),),
            numbers={"tried_gib": 2.0, "blocks": 2, "device": "0"},
            evidence=(Evidence(3, "EngineCore", "boom"),),
        ),
        devices=(DeviceMemory("0", 10, 5, 1, holders=(ProcessRef(1, ours=True),)),),
    )
    again = through_text(fact)
    assert isinstance(again.diagnosis.kind, Kind)
    assert [type(value) for value in again.diagnosis.numbers.values()] == [float, int, str]
    assert isinstance(again.devices, tuple)
    assert isinstance(again.devices[0].holders[0], ProcessRef)


def test_levers_and_moves_take_their_public_form() -> None:
    move = Move("gpu_memory_utilization", 900, 741, "down", "computed")
    assert codec.to_json(move) == {
        "lever": "gpu_memory_utilization",
        "from": 0.9,
        "to": 0.741,
        "direction": "down",
        "how": "computed",
    }
    started = DaemonStarted(
        at_ns=0, boot_id="b", next_launch=1, next_decision=1, last_known_good=Levers({"max_num_seqs": 4})
    )
    assert codec.to_json(started)["last_known_good"] == {"max_num_seqs": 4}


def test_an_older_program_reads_a_newer_minor() -> None:
    data = {**codec.to_json(Tick(at_ns=5, launch=1)), "colour": "blue"}
    assert codec.from_json("Tick", data) == Tick(at_ns=5, launch=1)
    assert codec.from_json("Tick", {"at_ns": 5}) == Tick(at_ns=5)
    assert codec.from_json("Levers", {"max_num_seqs": 4, "lever_of_tomorrow": 1}) == Levers({"max_num_seqs": 4})


@pytest.mark.parametrize(
    ("name", "data", "place"),
    [
        ("Tick", {}, "Tick.at_ns is missing"),
        ("Tick", {"at_ns": "5"}, "Tick.at_ns"),
        ("Tick", {"at_ns": True}, "Tick.at_ns"),
        ("Tick", [], "Tick"),
        ("Spawned", {"at_ns": 1, "pid": 1, "start_ticks": 1, "argv": "ls", "log": ""}, "Spawned.argv"),
        ("Spawned", {"at_ns": 1, "pid": 1, "start_ticks": 1, "argv": ["ls", 2], "log": ""}, r"Spawned.argv\[1\]"),
        ("PhaseSeen", {"at_ns": 1, "phase": "sleeping"}, "PhaseSeen.phase"),
        ("Diagnosed", {"at_ns": 1, "diagnosis": {"kind": "gremlins"}}, "Diagnosed.diagnosis.kind"),
        ("Levers", {"max_num_seqs": "many"}, "Levers"),
        ("Nothing", {}, "Nothing"),
    ],
)
def test_a_bad_value_is_refused_with_its_place(name: str, data: object, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        codec.from_json(name, data)


def test_no_class_of_the_contract_is_forgotten() -> None:
    assert {cls.__name__ for cls in FACTS} <= set(codec.CLASSES)
    assert through_text(Backoff()) == Backoff()
    assert through_text(Gate()) == Gate()
    with pytest.raises(ValueError, match="no JSON form"):
        codec.to_json(object())
    with pytest.raises(ValueError, match="no fact"):
        codec.fact_from_json("Gate", {})
    spawned = Spawned(at_ns=1, pid=1, start_ticks=2, argv=(), log="l")
    assert codec.fact_from_json("Spawned", codec.to_json(spawned)) == spawned
