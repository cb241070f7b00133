"""The daemon under test: a policy, its process, its state as an operator sees it, and afterwards its record."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.gpu.rig import Rig
from benchmarks.gpu.timeline import Json, Named
from supervisord_vllm.core.codec import policy_to_json, to_json
from supervisord_vllm.places import STORE, instance
from supervisord_vllm.store import History

STOP_S = 60.0


class BenchError(Exception):
    """A fault did not take its course; one line."""


@dataclass(frozen=True)
class Record:
    """What the store has of a run: its policy, its facts and its decisions, in their JSON form."""

    policy: Json
    facts: list[Named]
    decisions: list[Json]


def table(values: Mapping[str, object]) -> str:
    """Keys and values as lines of TOML; JSON's scalars are TOML's."""
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())


def policy_text(
    rig: Rig,
    folder: Path,
    ports: tuple[int, int],
    levers: Mapping[str, object],
    ladder: Sequence[Mapping[str, object]],
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    more: str = "",
) -> str:
    """A policy: the defaults, but for a neighbour's patience and the soak, which would only take time; ``more`` are
    tables of its own."""
    rungs = "\n".join(f"[[ladder]]\n{table(rung)}" for rung in ladder)
    return f"""\
schema = 1
name = "bench"
state-dir = {json.dumps(str(folder / "state"))}
runtime-dir = {json.dumps(str(folder / "run"))}
[engine]
command = {json.dumps(list(rig.command))}
model = {json.dumps(rig.model)}
args = {json.dumps([*rig.args, *args])}
host = "127.0.0.1"
port = {ports[0]}
[engine.env]
{table({**rig.env, **(env or {})})}
[levers]
{table({**rig.levers, **levers})}
{rungs}
[memory]
source = {json.dumps(rig.memory)}
[gate]
patience = "5s"
deadline = "60s"
[proof]
soak = "5s"
[http]
listen = "127.0.0.1:{ports[1]}"
[log]
format = "json"
engine-output = false
{more}"""


def free_ports() -> tuple[int, int]:
    """Two ports of the loopback that nobody listens on now."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


class Supervised:
    """One daemon in a folder of its own; a context manager at whose end it and its engine are gone."""

    def __init__(self, folder: Path, policy: str, ports: tuple[int, int], deadline: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.port = folder, ports[0]
        self._http, self._deadline = ports[1], deadline
        self._policy = folder / "policy.toml"
        self._policy.write_text(policy, encoding="utf-8")
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Supervised:  # noqa: PYI034 - `Self` is new in 3.11
        self.begin()
        return self

    def verb(self, *words: str) -> None:
        """A client's verb; one that is refused raises `BenchError`."""
        command = [sys.executable, "-m", "supervisord_vllm.cli.main", *words, "--config", str(self._policy)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise BenchError(f"{' '.join(words)}: {ran.stderr.strip()}")

    def die(self) -> None:
        """SIGKILL to the daemon alone, and another one."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.begin()

    def begin(self) -> None:
        """Start a daemon."""
        command = [sys.executable, "-m", "supervisord_vllm.cli.main", "--config", str(self._policy)]
        with (self.folder / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def left_s(self) -> float:
        """Seconds left of the time that this fault was given."""
        return self._deadline - time.monotonic()

    def status(self) -> Json:
        """``/api/v1/status``; empty where nobody answers."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self._http}/api/v1/status", timeout=10) as answer:
                found: Json = json.load(answer)
                return found
        except (urllib.error.URLError, OSError, ValueError):
            return {}

    def until(self, what: str, holds: Callable[[Json], object], every: float = 0.1) -> Json:
        """The first status for which it holds. Raises `BenchError` when the daemon ends or the time is over."""
        while True:
            status = self.status()
            if status and holds(status):
                return status
            assert self.process is not None
            if self.process.poll() is not None:
                raise BenchError(f"the daemon ended with status {self.process.returncode} before {what}")
            if self.left_s < 0:
                raise BenchError(f"no time left before {what}; state {status.get('state')}: {status.get('next')}")
            time.sleep(every)

    def serving(self, launch: int) -> Json:
        """The status once this launch, or a later one, is proven."""
        return self.until(
            f"launch {launch} serves",
            lambda status: status["state"] == "serving" and (status["launch"] or {}).get("number", 0) >= launch,
        )

    def ends(self) -> int:
        """The daemon's exit status when it ends by itself."""
        assert self.process is not None
        try:
            return self.process.wait(max(1.0, self.left_s))
        except subprocess.TimeoutExpired:
            raise BenchError(f"the daemon did not end by itself; {self.status().get('state')}") from None

    def stop(self) -> None:
        """SIGTERM, and wait until it is gone; a daemon that stays is killed, and so is what carries its marker."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """The living processes that carry this instance's marker."""
        needle = f"SUPERVISE_LAUNCH={instance(self.folder / 'state')}.".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # noqa: PERF203 - it is gone, or not ours to read
                continue
        return found

    def log(self, launch: int) -> Path:
        """The engine's output in one launch."""
        return self.folder / "state" / "launches" / f"{launch:06d}.log"

    def record(self) -> Record:
        """What the store has; read it once the daemon is gone."""
        history = History.open(self.folder / "state" / STORE)
        if history is None:
            return Record({}, [], [])
        with history:
            runs = history.runs()
            if not runs:
                return Record({}, [], [])
            run = runs[-1].run
            facts = [(type(fact).__name__, to_json(fact)) for fact in history.facts(run)]
            return Record(policy_to_json(history.policy(run)), facts, [row.json for row in history.decisions(run=run)])
