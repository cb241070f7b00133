"""The daemon's surfaces: who may read and change, bounded requests, a taken port, metrics that Prometheus reads."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from supervisord_vllm.api import Control, ControlSocket, Exporter, HttpServer, RefusedError, Verb
from supervisord_vllm.cli.daemon import DaemonError, NoDaemonError, ask
from supervisord_vllm.clock import Now
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.facts import DeviceMemory
from supervisord_vllm.core.levers import Levers, Weights
from supervisord_vllm.core.policy import Policy, Pressure
from supervisord_vllm.series import Series
from supervisord_vllm.status import LaunchView, Snapshot
from supervisord_vllm.store import Store
from supervisord_vllm.strain import Strained

LEVERS = Levers({"gpu_memory_utilization": 741, "enforce_eager": True, "weights": Weights("m")})
SNAPSHOT = Snapshot(
    name="qwen",
    now=Now(10**12, 1_796_000_000.0),
    state="serving",
    since_ns=0,
    declared=LEVERS.with_(gpu_memory_utilization=900),
    ready=True,
    launch=LaunchView(2, LEVERS, ("vllm",), 1, 0, "log"),
    memory=(DeviceMemory("GPU-1", 1000, 100, 10, 600),),
    next_what="nothing: it serves",
    budget_left=5,
    counters={"facts": 2},
)


class Daemon(Control):
    """A daemon that remembers what it was told and refuses to stop."""

    def __init__(self) -> None:
        self.now = SNAPSHOT
        self.told: list[tuple[str, str, str]] = []

    def snapshot(self) -> Snapshot:
        return self.now

    def series(self) -> dict[str, Any]:
        return Series(5.0).document(self.now.name, self.now.now)

    async def command(
        self,
        verb: Verb,
        reason: str,
        by: str,
        lever: str = "",
        direction: Literal["up", "down"] = "down",
        for_ns: int | None = None,
    ) -> str:
        if verb == "stop":
            raise RefusedError("stopping already")
        self.told.append((verb, reason, by))
        return f"{verb}: taken"


@asynccontextmanager
async def control_socket(path: Path, daemon: Daemon | None = None) -> AsyncIterator[ControlSocket]:
    server = ControlSocket(daemon or Daemon(), path, path.parent / "history.sqlite3")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def test_the_control_socket_answers_and_takes_verbs(tmp_path: Path) -> None:
    async def run() -> None:
        daemon = Daemon()
        path = tmp_path / "run" / "control.sock"
        async with control_socket(path, daemon):
            mode = path.stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o660
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
            status = await asyncio.to_thread(ask, path, "/status")
            assert status["name"] == "qwen"
            series = await asyncio.to_thread(ask, path, "/series")
            assert series["points"]["age_s"] == []
            hold = {"verb": "hold", "reason": "night\x1b[2J"}
            assert await asyncio.to_thread(ask, path, "/command", hold) == {"message": "hold: taken"}
            ((verb, reason, by),) = daemon.told
            assert (verb, reason) == ("hold", "night")
            assert by == os.environ.get("USER", by)
            with pytest.raises(DaemonError, match="stopping already"):
                await asyncio.to_thread(ask, path, "/command", {"verb": "stop"})
        assert not path.exists()
        with pytest.raises(NoDaemonError, match="no daemon listens"):
            await asyncio.to_thread(ask, path, "/status")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"verb": "shutdown"}, "unknown verb; known are start, stop, hold, resume"),
        ({"verb": ["stop"]}, "unknown verb"),
        ({}, "unknown verb"),
        ([], "unknown verb"),
        ({"verb": "hold", "reason": 7}, "the reason is no text"),
        ({"verb": "hold", "for": "2 hours"}, 'for: got "2 hours"; write a duration like "90s"'),
        ({"verb": "hold", "for": 7200}, "for: got 7200; write a duration"),
        ({"verb": "hold", "for": "0s"}, "must be longer than zero"),
        ({"verb": "stop", "for": "2h"}, "for: only a hold lasts for a time, stop does not"),
        ({"verb": "hold", "reason": "x" * 100_000}, "413"),
    ],
)
def test_a_bad_command_is_refused_in_one_line_and_changes_nothing(tmp_path: Path, body: object, message: str) -> None:
    async def run() -> None:
        daemon = Daemon()
        async with control_socket(tmp_path / "control.sock", daemon) as server:
            with pytest.raises(DaemonError, match=message):
                await asyncio.to_thread(ask, server.path, "/command", body)
            assert daemon.told == []
            reader, writer = await asyncio.open_unix_connection(server.path)
            writer.write(b"POST /command HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nno json!!")
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 20)
            writer.close()
            reader, writer = await asyncio.open_unix_connection(server.path)
            writer.write(b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n")
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 20)
            writer.close()

    asyncio.run(run())


CLIENT = """
import encodings.idna, os, sys
from pathlib import Path
from supervisord_vllm.cli.daemon import DaemonError, ask
uid, gid, extra, path, target, body = sys.argv[1:]
os.setgroups([int(group) for group in extra.split(",") if group])
os.setgid(int(gid)); os.setuid(int(uid))
try:
    print("ok", ask(Path(path), target, {"verb": body} if body else None).get("name"))
except DaemonError as error:
    print("refused", error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
@pytest.mark.parametrize(
    ("uid", "gid", "extra", "change", "expected"),
    [
        (0, 0, "", True, "ok"),
        (54321, 54400, "", False, "ok qwen"),
        (54321, 54322, "54400", False, "ok qwen"),
        (54321, 54322, "", False, "refused uid 54321 is not in the group of"),
        (54321, 54400, "", True, "refused uid 54321 may read but not change; ask root or root"),
    ],
)
def test_the_group_reads_and_owner_and_root_change(
    tmp_path: Path, uid: int, gid: int, extra: str, change: bool, expected: str
) -> None:
    async def run() -> None:
        async with control_socket(Path("/tmp") / f"vs{os.getpid()}-{uid}-{gid}.sock") as server:
            os.chown(server.path, -1, 54400)
            server.path.chmod(0o666)  # the file's mode would already refuse; here the credentials must
            target, body = ("/command", "hold") if change else ("/status", "")
            words = [str(uid), str(gid), extra, str(server.path), target, body]
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CLIENT, *words, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parent.parent
            )
            output, _ = await asyncio.wait_for(client.communicate(), 60)
            assert output.decode().startswith(expected)

    asyncio.run(run())


def test_a_socket_left_behind_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    async def run() -> None:
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(tmp_path / "control.sock"))
        left.close()
        async with control_socket(tmp_path / "control.sock") as server:
            assert (await asyncio.to_thread(ask, server.path, "/status"))["name"] == "qwen"
            server.path.unlink()
            server.path.write_text("a later daemon's")
        assert server.path.read_text() == "a later daemon's"
        with pytest.raises(OSError, match=r"control\.sock: something else than a socket lies there; give another"):
            await ControlSocket(Daemon(), tmp_path / "control.sock", tmp_path).start()
        long = tmp_path / ("x" * 100) / "control.sock"
        with pytest.raises(OSError, match="path is longer than 107 bytes"):
            await ControlSocket(Daemon(), long, tmp_path).start()

    asyncio.run(run())


def test_the_history_comes_from_the_store_and_a_missing_one_is_said(tmp_path: Path) -> None:
    async def run() -> None:
        async with control_socket(tmp_path / "control.sock") as server:
            with pytest.raises(DaemonError, match="there is no store at"):
                await asyncio.to_thread(ask, server.path, "/history")
            warnings: list[str] = []
            store = Store.open(tmp_path / "history.sqlite3", warn=warnings.append)
            store.start_run(Policy(name="qwen"), "0.1.0", "boot")
            store.launch_started(1, LEVERS, ["vllm"], 1, "log")
            assert store.close()
            for _ in range(2):  # every question reads anew
                history = await asyncio.to_thread(ask, server.path, "/history")
                assert [launch["number"] for launch in history["launches"]] == [1]

    asyncio.run(run())


@asynccontextmanager
async def http(daemon: Daemon, store: Path, **options: Any) -> AsyncIterator[tuple[HttpServer, list[str]]]:  # noqa: ANN401
    warnings: list[str] = []
    address = options.pop("address", ("127.0.0.1", 0))
    server = HttpServer(daemon, Exporter(daemon, "0.1.0"), store, address, warnings.append, **options)
    await server.start()
    try:
        yield server, warnings
    finally:
        await server.stop()


async def get(server: HttpServer, path: str, method: str = "GET") -> tuple[int, str, str]:
    assert server.address is not None
    host, port = server.address
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{host}:{port}{path}") as response,
    ):
        return response.status, response.headers.get("Content-Type", ""), await response.text()


def test_machines_see_liveness_readiness_and_status(tmp_path: Path) -> None:
    async def run() -> None:
        daemon = Daemon()
        async with http(daemon, tmp_path / "history.sqlite3") as (server, warnings):
            assert (await get(server, "/livez"))[0] == 200
            assert (await get(server, "/readyz"))[0::2] == (200, "ready\n")
            daemon.now = replace(SNAPSHOT, state="gating", ready=False, next_what="launch 3 once the gate opens")
            assert (await get(server, "/readyz"))[0::2] == (503, "gating: launch 3 once the gate opens\n")
            assert (await get(server, "/livez"))[0] == 200
            status, kind, text = await get(server, "/api/v1/status")
            assert (status, kind.split(";")[0], json.loads(text)["state"]) == (200, "application/json", "gating")
            status, kind, text = await get(server, "/api/v1/series")
            assert (status, kind.split(";")[0], json.loads(text)["name"]) == (200, "application/json", "qwen")
            assert (await get(server, "/api/v1/history"))[0] == 503
            assert (await get(server, "/nothing"))[0] == 404
            assert (await get(server, "/api/v1/status", "POST"))[0] == 405
            assert warnings == []

    asyncio.run(run())


def test_a_taken_port_is_warned_about_and_taken_when_it_is_free(tmp_path: Path) -> None:
    async def run() -> None:
        with socket.socket() as owner:
            owner.bind(("127.0.0.1", 0))
            owner.listen()
            address = owner.getsockname()
            async with http(Daemon(), tmp_path, address=address, retry_s=0.05) as (server, warnings):
                assert server.address is None
                where = f"HTTP 127.0.0.1:{address[1]}"
                without = "Address already in use; going on without HTTP, trying again every 0.05 s"
                assert warnings == [f"{where}: {without}"]
                await asyncio.sleep(0.2)
                assert len(warnings) == 1
                owner.close()
                await asyncio.wait_for(server.listening(), 30)
                assert (await get(server, "/livez"))[0] == 200
                assert warnings[1:] == [f"{where}: listening now"]
            async with http(Daemon(), tmp_path, address=("192.0.2.1", 9), retry_s=30) as (server, warnings):
                assert len(warnings) == 1

    asyncio.run(run())


def test_pressure_is_exported_in_base_units() -> None:
    class Pressed(Daemon):
        def snapshot(self) -> Snapshot:
            targets = Pressure(ttft_ns=5 * 10**9, inter_token_ns=10**8)
            strained = Strained("declared", targets, "slot", True, 0.42, 71.2, 120.0, 1.7, missed=2)
            return replace(super().snapshot(), strained=strained)

    samples = {
        (sample.name.removeprefix("vllm_supervise_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(Exporter(Pressed(), "0.1.0").page().decode())
        for sample in family.samples
    }
    expected = {
        ("pressure_loss_ratio",): 0.42,
        ("pressure_lost_seconds",): 71.2,
        ("pressure_worth_seconds",): 120,
        ("pressure_verdict", "slot"): 1,
        ("pressure_verdict", "kv"): 0,
        ("pressure_target_seconds", "ttft"): 5,
        ("pressure_target_seconds", "inter_token"): 0.1,
        ("pressure_engines_needed",): 1.7,
        ("metrics_pages_missed",): 2,
    }
    assert {key: samples.get(key) for key in expected} == expected
    assert ("pressure_target_seconds", "queue") not in samples


def test_prometheus_reads_every_documented_metric(tmp_path: Path) -> None:
    daemon = Daemon()
    exporter = Exporter(daemon, "0.1.0")
    exporter.launched()
    exporter.launched()
    exporter.failed(Kind.OOM_RUNTIME)
    exporter.decided(Decision(1, 1, 1, Kind.OOM_RUNTIME, Action.NEXT_CONFIG, "s"))
    exporter.started(25.0)
    exporter.recovered(7200.0)
    samples = {
        (sample.name.removeprefix("vllm_supervise_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(exporter.page().decode())
        for sample in family.samples
    }
    expected = {
        ("state", "serving"): 1,
        ("state", "given-up"): 0,
        ("launches_total",): 2,
        ("failures_total", "oom_runtime"): 1,
        ("decisions_total", "next_config", "oom_runtime"): 1,
        ("lever", "gpu_memory_utilization"): 0.741,
        ("lever", "enforce_eager"): 1,
        ("declared_lever", "gpu_memory_utilization"): 0.9,
        ("start_duration_seconds_bucket", "20.0"): 0,
        ("start_duration_seconds_bucket", "30.0"): 1,
        ("start_duration_seconds_count",): 1,
        ("start_duration_seconds_sum",): 25,
        ("recovery_seconds_bucket", "3600.0"): 0,
        ("recovery_seconds_bucket", "+Inf"): 1,
        ("memory_bytes", "GPU-1", "total"): 1000,
        ("memory_bytes", "GPU-1", "free"): 100,
        ("memory_bytes", "GPU-1", "own"): 600,
        ("memory_bytes", "GPU-1", "requested"): 741,
        ("budget_remaining",): 5,
        ("lost_total", "facts"): 2,
        ("build_info", "0.1.0"): 1,
    }
    assert {key: samples.get(key) for key in expected} == expected
    assert ("lever", "weights") not in samples

    async def run() -> None:
        async with http(daemon, tmp_path) as (server, _):
            status, kind, text = await get(server, "/metrics")
            assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
            assert "vllm_supervise_budget_remaining 5.0\n" in text

    asyncio.run(run())
