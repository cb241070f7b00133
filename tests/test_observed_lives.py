"""What was learnt outlives the daemon, and a replay of the record decides the same."""

from __future__ import annotations

from pathlib import Path

from simulated_days import day
from supervisord_vllm.api import Exporter
from supervisord_vllm.chronicle import Chronicle
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.facts import Commanded, DaemonStarted
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.observations import Observation
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import State
from supervisord_vllm.store import Store


class Nobody:
    """An exporter's daemon that nobody asks."""

    def snapshot(self) -> object:
        raise AssertionError


SEEN = Observation(Levers({"gpu_memory_utilization": 900}), "failed-high", Kind.OOM_RUNTIME, 10**9, setting="x", free=5)


def chronicle(path: Path, policy: Policy) -> tuple[Store, Chronicle]:
    store = Store.open(path / "history.sqlite3", warn=lambda text: None)
    return store, Chronicle(store, Exporter(Nobody(), "1"), policy)  # type: ignore[arg-type]  # only what it counts with


def test_observations_are_kept_for_the_surroundings_and_a_reset_forgets_failures(tmp_path: Path) -> None:
    policy = Policy("p", fingerprint="f", surroundings="s")
    store, first = chronicle(tmp_path, policy)
    before = State.initial()
    first.begin("boot")
    learnt = State(observations=(SEEN,))
    first.note(before, learnt, Commanded(at_ns=1, verb="resume"))
    store.close()
    store, second = chronicle(tmp_path, policy)
    assert second.observations() == (SEEN,)
    assert chronicle_of(store, Policy("p", fingerprint="other", surroundings="s")).observations() == (SEEN,)
    assert chronicle_of(store, Policy("p", fingerprint="f", surroundings="elsewhere")).observations() == ()
    second.note(learnt, State(), Commanded(at_ns=1, verb="reset"))
    assert second.observations() == ()
    store.set_meta("observations:s", [{"nonsense": 1}, "text"])
    assert second.observations() == (), "what cannot be read is forgotten"
    store.close()


def chronicle_of(store: Store, policy: Policy) -> Chronicle:
    return Chronicle(store, Exporter(Nobody(), "1"), policy)  # type: ignore[arg-type]


def test_a_started_daemon_remembers_and_ages_in_wall_time() -> None:
    started = DaemonStarted(
        at_ns=50 * SECOND, boot_id="b", next_launch=3, next_decision=4, observations=(SEEN,), wall_s=2 * 10**9
    )
    state, _ = decide(Policy("p"), State.initial(), started)
    assert state.observations == (SEEN,)
    assert state.wall_s(60 * SECOND) == 2 * 10**9 + 10


def test_a_simulated_day_replayed_fact_by_fact_decides_the_same() -> None:
    from supervisord_vllm.core import codec
    from supervisord_vllm.core.facts import Fact
    from supervisord_vllm.rehearsal.play import Play
    from supervisord_vllm.replay import replay_facts

    seen: list[Fact] = []

    class Noted(Play):
        def _step(self, fact: Fact) -> None:
            seen.append(fact)
            super()._step(fact)

    made = day(11)
    played = Noted(made.policy, made.scenario).run()
    policy = codec.policy_from_json(codec.policy_to_json(made.policy))
    facts = [codec.fact_from_json(type(fact).__name__, codec.to_json(fact)) for fact in seen]
    again = replay_facts(facts, policy, decide, State.initial())
    assert again == [judged.decision for judged in played.decisions]
    assert again


def test_a_real_history_is_put_through_a_changed_policy(tmp_path: Path) -> None:
    import json

    from typer.testing import CliRunner

    from supervisord_vllm.cli.main import app
    from supervisord_vllm.config import load
    from supervisord_vllm.core.facts import Fact
    from supervisord_vllm.rehearsal.play import Play
    from supervisord_vllm.simulation.virtual_scenario import read_scenario

    example = Path(__file__).resolve().parent.parent / "config.example.toml"
    policy = load(example, environ={"HOME": "/"}).policy
    store = Store.open(tmp_path / "history.sqlite3", warn=lambda text: None)
    run = store.start_run(policy, "1", "boot")

    class Recorded(Play):
        def _step(self, fact: Fact) -> None:
            store.record_fact(run, fact)
            super()._step(fact)

    Recorded(policy, read_scenario("out-of-memory")).run()
    store.close()
    same = CliRunner().invoke(app, ["rehearse", "--config", str(example), "--history", str(tmp_path), "--json"])
    assert same.exit_code == 0, same.output
    told = json.loads(same.output)["runs"]
    assert [one["same"] for one in told] == [True]
    assert len(told[0]["decided"]) == 2
    changed = tmp_path / "changed.toml"
    changed.write_text(example.read_text(encoding="utf-8").replace("step = 0.05 ", "step = 0.10 "), encoding="utf-8")
    other = CliRunner().invoke(app, ["rehearse", "--config", str(changed), "--history", str(tmp_path)])
    assert other.exit_code == 0, other.output
    assert "the first that differs is number 1" in other.output
    assert "utilization 0.900 → 0.850" in other.output
    assert "utilization 0.900 → 0.800" in other.output
    missing = CliRunner().invoke(app, ["rehearse", "--config", str(example), "--history", str(tmp_path / "none")])
    assert missing.exit_code == 3
