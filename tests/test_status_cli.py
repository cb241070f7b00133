"""The client verbs: which instance is meant, what they say without a daemon, and that they start in no time."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from supervisord_vllm import places
from supervisord_vllm.api import ControlSocket
from supervisord_vllm.cli import control, history, instance, status
from supervisord_vllm.cli.instance import InstanceError, find, instances
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.store import Store
from test_api import Daemon

HEAVY = ("aiohttp", "pydantic", "structlog", "pynvml", "prometheus_client")


def record(state_dir: Path, told: object = None) -> Path:
    warnings: list[str] = []
    store = Store.open(state_dir / "history.sqlite3", warn=warnings.append)
    store.start_run(Policy(name="qwen", declared=Levers({"max_num_seqs": 16})), "0.1.0", "boot")
    store.launch_started(1, Levers({"max_num_seqs": 16}), ["vllm"], 1, "launches/000001.log")
    store.record_decision(Decision(1, 5, 1, Kind.UNKNOWN, Action.STOP_EXPLAIN, "It is unknown why. `logs` shows it."))
    if told is not None:
        store.set_meta(places.INSTANCE_META, told)
    assert store.close()
    assert warnings == []
    return state_dir


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose /var/lib and /run lie in a folder of ours."""
    monkeypatch.setattr(instance, "SYSTEM", (tmp_path / "lib", tmp_path / "run"))
    for variable in ("STATE_DIRECTORY", "RUNTIME_DIRECTORY", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def code_of(error: pytest.ExceptionInfo[typer.Exit]) -> int:
    return error.value.exit_code


def test_the_only_instance_is_taken_and_several_ask_for_a_name(system: Path) -> None:
    with pytest.raises(InstanceError, match="no instance is known here; name one with") as none:
        find()
    assert none.value.code == 3
    record(system / "lib" / "vllm-supervise" / "qwen")
    assert find().state_dir == system / "lib" / "vllm-supervise" / "qwen"
    assert find().socket == system / "run" / "vllm-supervise" / "qwen" / "control.sock"
    (system / "run" / "vllm-supervise" / "llama").mkdir(parents=True)
    assert instances(os.environ) == ["qwen"]  # an empty folder is no instance
    (system / "run" / "vllm-supervise" / "llama" / "control.sock").touch()
    with pytest.raises(InstanceError, match="several instances: llama, qwen; choose one with --name") as several:
        find()
    assert several.value.code == 2
    assert find("llama").name == "llama"
    with pytest.raises(InstanceError, match="cannot be an instance's name"):
        find("../etc")


def test_a_state_directory_knows_its_name_and_socket(system: Path) -> None:
    told = record(system / "elsewhere", {"name": "qwen", "runtime_dir": "/run/odd"})
    found = find(state_dir=told)
    assert (found.name, str(found.socket)) == ("qwen", "/run/odd/control.sock")
    silent = record(system / "silent")
    (silent / "run").mkdir()
    (silent / "run" / "control.sock").touch()
    found = find(state_dir=silent)
    assert (found.name, found.socket) == ("silent", silent / "run" / "control.sock")
    given = find(environ={"STATE_DIRECTORY": str(told)})
    assert given.name == "qwen"


def test_a_policy_file_is_read_for_its_name_and_folders_only(system: Path) -> None:
    policy = system / "qwen.toml"
    policy.write_text('schema = 7\nstate-dir = "s"\nruntime-dir = "/run/x"\n[engine]\nmodel = 5\n')
    found = find(config=policy)
    assert (found.name, found.state_dir, found.runtime_dir) == ("qwen", system / "s", Path("/run/x"))
    drop_ins = system / "conf.d"
    drop_ins.mkdir()
    (drop_ins / "10.toml").write_text('name = "other"\n')
    assert find(config=policy).name == "other"
    assert find(config=policy, environ={"SUPERVISE_NAME": "third"}).name == "third"
    assert find(config=policy, state_dir=system / "t").state_dir == system / "t"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no such policy file"), (b"\xff\xfe\x00", "not valid TOML"), (b"name = ", "not valid TOML")],
)
def test_a_policy_file_that_cannot_be_read_is_one_line_and_78(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    policy = tmp_path / "qwen.toml"
    if content is not None:
        policy.write_bytes(content)
    with pytest.raises(typer.Exit) as error:
        status.status(config=policy)
    assert code_of(error) == 78
    said = capsys.readouterr().err
    assert message in said
    assert str(policy) in said
    assert said.count("\n") == 1


def test_without_a_daemon_the_store_answers_and_verbs_end_with_3(
    system: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state_dir = record(system / "qwen")
    before = sorted(entry.name for entry in state_dir.iterdir())
    status.status(state_dir=state_dir)
    assert capsys.readouterr().out.startswith("qwen: no daemon runs")
    status.status(state_dir=state_dir, as_json=True)
    assert json.loads(capsys.readouterr().out)["state"] == "no-daemon"
    history.history(state_dir=state_dir)
    assert "It is unknown why." in capsys.readouterr().out
    history.history(state_dir=state_dir, as_json=True)
    assert [one["number"] for one in json.loads(capsys.readouterr().out)["decisions"]] == [1]
    history.explain(state_dir=state_dir)
    assert "no daemon runs; decision 1 on launch 1" in capsys.readouterr().out
    for verb in (control.start, control.stop, control.hold, control.resume):
        with pytest.raises(typer.Exit) as error:
            verb(state_dir=state_dir)
        assert code_of(error) == 3
        assert "no daemon listens at" in capsys.readouterr().err
    assert sorted(entry.name for entry in state_dir.iterdir()) == before


def test_nothing_known_ends_with_3(system: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as error:
        status.status(state_dir=system / "none")
    assert code_of(error) == 3
    assert "none: no daemon runs and there is no history at" in capsys.readouterr().err
    (system / "torn").mkdir()
    (system / "torn" / "history.sqlite3").write_bytes(b"nonsense" * 1000)
    with pytest.raises(typer.Exit) as error:
        history.history(state_dir=system / "torn")
    assert code_of(error) == 3
    assert "cannot be read: file is not a database" in capsys.readouterr().err


def test_a_running_daemon_is_asked(system: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        daemon = Daemon()
        state_dir = record(system / "qwen", {"name": "qwen", "runtime_dir": str(system / "r")})
        server = ControlSocket(daemon, system / "r" / "control.sock", state_dir / "history.sqlite3")
        await server.start()
        try:
            await asyncio.to_thread(status.status, state_dir=state_dir)
            assert capsys.readouterr().out.startswith("qwen: serving, ready, below what was declared, since")
            await asyncio.to_thread(history.history, state_dir=state_dir)
            assert "decision 1" in capsys.readouterr().out
            await asyncio.to_thread(control.hold, reason="night", state_dir=state_dir)
            assert capsys.readouterr().out == "hold: taken\n"
            assert [told[:2] for told in daemon.told] == [("hold", "night")]
            with pytest.raises(typer.Exit) as error:
                await asyncio.to_thread(control.stop, state_dir=state_dir)
            assert code_of(error) == 3
            assert capsys.readouterr().err == "vllm-supervise: stop: stopping already\n"
        finally:
            await server.stop()

    asyncio.run(run())


def fresh(program: str, *words: str) -> list[str]:
    """The lines that a program prints in an interpreter of its own."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("verb", ["status.status", "history.explain", "history.history"])
def test_reading_verbs_import_nothing_heavy(tmp_path: Path, verb: str) -> None:
    state_dir = record(tmp_path / "qwen")
    module, _, name = verb.partition(".")
    lines = fresh(
        f"import sys; from pathlib import Path; from supervisord_vllm.cli.{module} import {name}\n"
        f"{name}(state_dir=Path(sys.argv[1]))\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])\n",
        str(state_dir),
    )
    assert "qwen" in lines[0]
    assert lines[-1] == "heavy: []"


@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["explain"], ["history", "--json"]])
def test_the_command_line_reaches_the_reading_verbs(tmp_path: Path, words: list[str]) -> None:
    state_dir = record(tmp_path / "qwen")
    program = "from supervisord_vllm.cli.main import main; main()"
    text = "\n".join(fresh(program, *words, "--state-dir", str(state_dir)))
    assert "qwen" in text
    if "--json" in words:
        assert json.loads(text)["schema"] == 1
