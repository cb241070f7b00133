"""Cards, faults and the shared state: strict reading, and memory that belongs to living processes only."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import supervisord_vllm.simulation
from simulated_engine import FAST, await_condition, card_in, neighbour
from supervisord_vllm.simulation.card import CardError, parse_card, read_card
from supervisord_vllm.simulation.fault import FaultError, read_faults
from supervisord_vllm.simulation.memory import read_memory
from supervisord_vllm.simulation.quantity import GIB, MIB, read_duration, read_size, torch_size
from supervisord_vllm.simulation.shared_card import CardFullError, SharedCard

BASED = 'schema = 1\nbase = "h200"\n'


def test_the_packaged_card_is_the_h200_of_the_captures() -> None:
    device = read_card("h200").device
    assert (device.total, device.usable) == (143771 * MIB, 143156 * MIB)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "schema = 1"),
        ("schema = 2", "schema = 1"),
        ("schema = ", "no TOML"),
        ("schema = 1", "[card]"),
        (BASED + "speed = 3", "unknown key 'speed'"),
        (BASED + "[card]\ntotal = 5", '"40GiB"'),
        (BASED + "[card]\nsize = 5", "unknown key 'size'"),
        (BASED + "[card]\nreserved = '200GiB'", "leave nothing"),
        (BASED + "[timing]\nspeed = 0", "above 0"),
        (BASED + "[timing]\nimports = 'soon'", '"90s"'),
        (BASED + "[model.x]\nlayers = 1", "lacks"),
        (BASED + "[[fault]]\nkind = 'meteor'", "'meteor'"),
        (BASED + "[[fault]]\nkind = 'oom'\nat = 'importing'", "'importing'"),
        (BASED + "[[fault]]\nkind = 'oom'\nlaunch = 0", "launch"),
        (BASED + "[[fault]]\nkind = 'oom'\nat = 'capture'\nafter = '1s'", "running"),
        (BASED + "[[fault]]\nkind = 'neighbour-takes'", "bytes"),
        (BASED + "[[fault]]\nkind = 'exit'\ncode = 300", "255"),
        ("schema = 1\nbase = 'nowhere.toml'", "nowhere.toml"),
    ],
)
def test_a_wrong_card_is_refused_in_one_line_that_names_the_fix(text: str, named: str) -> None:
    with pytest.raises(CardError) as caught:
        parse_card(text, "card.toml")
    message = str(caught.value)
    assert named in message
    assert "\n" not in message


def test_a_scenario_is_laid_over_its_base(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(BASED + "[timing]\nspeed = 7\n[[fault]]\nkind = 'hang'\n")
    second.write_text("schema = 1\nbase = 'a.toml'\n[[fault]]\nkind = 'oom'\nlaunch = [2, 3]\n")
    card = read_card(second)
    assert card.timing.speed == 7
    assert [(fault.kind, fault.launches) for fault in card.faults] == [("hang", ()), ("oom", (2, 3))]
    second.write_text("schema = 1\nbase = 'b.toml'\n")
    with pytest.raises(CardError, match="circle"):
        read_card(second)


def test_faults_in_one_line_mean_what_the_table_means() -> None:
    faults = read_faults("oom at=running after-requests=3 launch=2; neighbour-takes bytes=40GiB for=5s launch=1,4")
    assert [(f.kind, f.at, f.launches, f.after_requests, f.bytes) for f in faults] == [
        ("oom", "running", (2,), 3, None),
        ("neighbour-takes", "importing", (1, 4), 1, 40 * GIB),
    ]
    for wrong in ("meteor", "oom at", "oom launch=x", "slow-start factor=x", "oom after-requests=x"):
        with pytest.raises(FaultError, match="SIMULATED_FAULTS"):
            read_faults(wrong)


def test_sizes_and_durations() -> None:
    assert (read_size("1.5GiB"), read_size("12"), read_size("-1GiB")) == (GIB * 3 // 2, None, None)
    assert (read_duration("250ms"), read_duration("2m"), read_duration("soon")) == (0.25, 120.0, None)
    assert [torch_size(size) for size in (512, 761344, 462 * MIB, 41 * GIB)] == [
        "512 bytes",
        "743.50 KiB",
        "462.00 MiB",
        "41.00 GiB",
    ]


def test_an_allocation_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with (
        card_in(tmp_path) as state,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as holder,
    ):
        card = SharedCard(state)
        free = card.free()
        card.hold(100 * GIB, "test", holder.pid)
        with pytest.raises(CardFullError) as caught:
            card.grow(50 * GIB, "test", holder.pid)
        assert caught.value.free == free - 100 * GIB
        assert card.free() == free - 100 * GIB
        assert card.fill(MIB, "test", holder.pid) == MIB
        card.release(holder.pid)
        assert card.free() == free
        holder.kill()


def test_memory_of_a_dead_process_is_released_and_its_pid_means_nothing(tmp_path: Path) -> None:
    with card_in(tmp_path) as state:
        card = SharedCard(state)
        with neighbour(state, "40GiB") as process:
            memory = read_memory(state)
            assert [(h.pid, h.bytes, h.command) for h in memory.holders] == [(process.pid, 40 * GIB, "python")]
            assert memory.free == memory.usable - 40 * GIB
            process.send_signal(signal.SIGKILL)
            # A zombie, not yet waited for, has no memory either.
            await_condition(lambda: read_memory(state).free == memory.usable, "release by death")
        card.hold(GIB, "test")
        text = state.read_text().replace(f'"start_ticks": {card.holders()[0].start_ticks}', '"start_ticks": 1')
        state.write_text(text)
        assert read_memory(state).holders == ()
        card.release()


def test_a_neighbour_waits_for_its_condition_and_leaves_when_its_time_is_over(tmp_path: Path) -> None:
    with card_in(tmp_path) as state, neighbour(state, "5GiB", "--when", "launch=1", "--for", "50ms") as process:
        assert process.poll() is None
        assert read_memory(state).holders == ()
        SharedCard(state).count_launch()
        assert process.wait(60) == 0
        assert read_memory(state).holders == ()


def test_a_neighbour_that_does_not_fit_says_so(tmp_path: Path) -> None:
    with card_in(tmp_path) as state, neighbour(state, "500GiB", "--for", "1s") as process:
        assert process.wait(60) == 1


def test_a_damaged_or_missing_state_is_a_clear_error(tmp_path: Path) -> None:
    missing, damaged = tmp_path / "none.json", tmp_path / "bad.json"
    damaged.write_bytes(b"{\xff")
    for path in (missing, damaged):
        with pytest.raises(CardError, match=path.name):
            read_memory(path)
    with pytest.raises(CardError, match="SIMULATED_CARD"):
        SharedCard.from_environment({})


def test_the_card_is_made_from_the_variable_the_file_beside_it_or_the_package(tmp_path: Path) -> None:
    state = tmp_path / "card.json"
    assert SharedCard.from_environment({"SIMULATED_CARD": str(state)}).card().timing.speed == 40
    state.unlink()
    (tmp_path / "card.toml").write_text(BASED + "[timing]\nspeed = 9\n")
    card = SharedCard.from_environment({"SIMULATED_CARD": str(state)})
    assert card.card().timing.speed == 9
    card.count_launch()
    (tmp_path / "other.toml").write_text(FAST)
    variables = {"SIMULATED_CARD": str(state), "SIMULATED_CARD_TOML": str(tmp_path / "other.toml")}
    assert SharedCard.from_environment(variables).card().timing.speed == 5000
    assert card.progress()[0] == 1


def test_the_simulation_never_imports_the_core() -> None:
    folder = Path(supervisord_vllm.simulation.__file__).parent
    modules = sorted(folder.glob("**/*.py"))
    assert len(modules) > 10
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, module
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            ours = [name for name in names if name.startswith("supervisord_vllm.")]
            assert all(name.startswith("supervisord_vllm.simulation") for name in ours), (module, ours)


def test_the_stand_in_starts_light() -> None:
    code = "import sys, supervisord_vllm.simulation.api_server; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert not {"aiohttp", "pydantic", "typer", "structlog", "prometheus_client"} & set(loaded.stdout.split())
