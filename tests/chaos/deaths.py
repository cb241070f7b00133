"""Seeded rounds of the daemon's death: killed or upgraded at any moment, under streaming load, with a full disk or not.

Each round brings a daemon on the stand-in engine to a moment (gating, starting, proving, serving, draining, stopping),
kills it with SIGKILL or lets it replace itself (``upgrade``), and demands of the daemon that follows: one engine,
started once; no process and no launch number twice; every line of the engine's output in the copy, once; streams that
end as they should where the engine lived on. Some rounds fill the state directory's disk up first.

As a script it runs rounds that have not run yet and keeps those that passed in a file, so that it can be broken off:
``deaths.py --rounds 500 --done FILE [--first SEED]``. Needs root: the disk is a tmpfs in a mount namespace of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":
    sys.path[0:1] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from daemon_process import MODEL, DaemonProcess, until
from supervisord_vllm.cli.daemon import DaemonError, ask
from supervisord_vllm.places import SOCKET, STORE
from supervisord_vllm.store import History

NUMBERED = Path(__file__).with_name("numbered.py")
MOMENTS = ("gating", "starting", "proving", "serving", "draining", "stopping")
CAMPAIGN = 5
"""Rounds that one instance lives through."""
STREAMS = 3
TOKENS = 60
TOKEN = "20ms"
"""So that a stream lasts longer than a death: more than a second."""
DISK = "8M"
_NUMBERED = re.compile(r"^numbered ([0-9]{6}\.log) ([0-9]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Round:
    """One death."""

    moment: str
    deed: str
    full: Literal["", "before", "at"]
    """Whether the disk is filled up, and when: before the moment (what is new then cannot be kept), or at it."""
    delay_s: float
    pause_s: float

    def __str__(self) -> str:
        return f"{self.deed} while {self.moment}{f', disk full {self.full} it' if self.full else ''}"


def round_of(seed: int) -> Round:
    """Every moment with both deeds comes within twelve seeds in a row; every fifth round has a full disk."""
    rng = random.Random(seed)
    return Round(
        moment=MOMENTS[seed % len(MOMENTS)],
        deed=("kill", "upgrade")[seed // len(MOMENTS) % 2],
        full="before" if seed % 10 == 9 else "at" if seed % 10 == 4 else "",
        delay_s=rng.uniform(0, 0.3),
        pause_s=rng.uniform(0, 0.5),
    )


@dataclass(frozen=True)
class Stream:
    """How one stream ended, and when (CLOCK_MONOTONIC)."""

    began: float
    ended: float
    whole: bool


class Load:
    """Clients that stream completions one after the other, for as long as an engine answers."""

    def __init__(self, port: int) -> None:
        self.streams: list[Stream] = []
        self._port = port
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the present streams."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def broken(self, since: float) -> list[Stream]:
        """Streams that ended badly after a moment."""
        return [stream for stream in self.streams if stream.ended >= since and not stream.whole]

    def _run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            whole = self._stream()
            if whole is None:
                self._over.wait(0.05)
            else:
                self.streams.append(Stream(began, time.monotonic(), whole))

    def _stream(self) -> bool | None:
        """Whether it ended as it should; ``None`` where it did not begin."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": TOKENS, "stream": True, "ignore_eos": True})
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException):
            return None
        try:
            if response.status != 200:
                return None
            return b"data: [DONE]" in response.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class Mortal:
    """An instance on a disk of its own, and the load on it."""

    def __init__(self, it: DaemonProcess) -> None:
        self.it = it
        self.filler = it.folder / "state" / "filler"
        self.kills = 0
        self.load = Load(it.port)

    def fill(self) -> None:
        """Not a byte is left on the disk of the state directory."""
        with contextlib.suppress(OSError), self.filler.open("ab", buffering=0) as file:
            for size in (1 << 16, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def empty(self) -> None:
        """There is room again."""
        self.filler.unlink(missing_ok=True)

    def state(self) -> str:
        """The present state; empty where nobody answers."""
        return str(self.it.status().get("state", ""))

    def live_through(self, one: Round) -> str:
        """A round; what it was in words."""
        begun = time.monotonic()
        self._settle()
        if one.full == "before":
            self.fill()
        squatter = self._bring_to(one)
        at = self.it.status()
        found, pid = at.get("state"), (at.get("launch") or {}).get("pid")
        if one.full == "at":
            self.fill()
        began = time.monotonic()
        try:
            self._die(one)
            until(lambda: self.state() not in ("", "adopting"), self.it.told)
        finally:
            self.empty()
            if squatter is not None:
                squatter.close()
        after = self._settle()
        adopted = pid is not None and pid == after["launch"]["pid"]
        if adopted:
            assert self.load.broken(began) == [], "streams broke though the engine lived on"
        kept = one.deed == "upgrade" or one.full != "before"
        if found in ("proving", "serving") and kept:
            assert adopted, f"an engine that was {found} was not adopted: {self.it.told()}"
        markers = self._markers()
        assert len(markers) == 1, f"engines of several launches live: {markers}"
        fate = "the same engine" if adopted else f"launch {after['launch']['number']}"
        return f"{one} (it was {found or 'gone'}): {fate} ({time.monotonic() - begun:.1f} s)"

    def _settle(self) -> dict[str, Any]:
        """It serves, whatever an operator's stop or drain left."""

        def there() -> dict[str, Any] | None:
            process = self.it.process
            assert process is not None
            assert process.poll() is None, f"the daemon ended with {process.returncode}: {self.it.told()}"
            found = self.it.status()
            if found.get("state") == "stopped":
                with contextlib.suppress(DaemonError):
                    self._ask("start")
            return found if found.get("state") == "serving" else None

        return until(there, lambda: f"{self.it.status()} {self.it.told()}")

    def _bring_to(self, one: Round) -> socket.socket | None:
        """To the round's moment, or shortly after where it is over at once; what keeps the gate shut, if anything."""
        squatter = None
        if one.moment == "gating":
            self._ask("stop")
            self.it.reaches("stopped")
            squatter = socket.create_server(("127.0.0.1", self.it.port))
            self._ask("start")
        elif one.moment in ("starting", "proving"):
            self._ask("restart")
        elif one.moment in ("draining", "stopping"):
            self._ask("drain" if one.moment == "draining" else "stop")
        deadline = time.monotonic() + 30
        passed = {"serving", "stopped"} - {one.moment} if one.moment in ("draining", "stopping") else set()
        while (state := self.state()) != one.moment and state not in passed and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(one.delay_s if one.moment in ("gating", "starting", "serving") else one.delay_s / 5)
        return squatter

    def _die(self, one: Round) -> None:
        process = self.it.process
        assert process is not None
        if one.deed == "upgrade":
            told = self._ask("upgrade")
            assert process.poll() is None, f"an upgrade ended the daemon: {told} {self.it.told()}"
            return
        process.kill()
        process.wait()
        self.kills += 1
        time.sleep(one.pause_s)
        self.it.start()

    def _ask(self, verb: str) -> str:
        """An operator's verb; a refusal is an error."""
        answer = ask(self.it.folder / "run" / SOCKET, "/command", {"verb": verb, "reason": "chaos"}, timeout=90)
        return str(answer)

    def _markers(self) -> set[str]:
        found = set()
        for pid in self.it.marked():
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {entry.decode() for entry in environ if entry.startswith(b"SUPERVISE_LAUNCH=")}
        return found

    def end(self) -> None:
        """SIGTERM, and what must hold of the whole life."""
        assert self.it.term() == 0
        self.load.stop()
        assert self.it.marked() == [], "processes with our marker are left"
        assert not (self.it.folder / "two-at-once").exists(), "an engine was started beside another one"
        logs = (self.it.folder / "logs").read_text().split()
        assert len(logs) == len(set(logs)), f"a launch number was used twice: {logs}"
        self._check_copy()
        history = History.open(self.it.folder / "state" / STORE)
        assert history is not None
        with contextlib.closing(history):
            unended = [launch.number for launch in history.launches() if launch.ended_at is None]
            unknown = [record.json["number"] for record in history.decisions() if record.outcome is None]
        assert (unended, unknown) == ([], []), "launches or decisions have no end"
        assert any(stream.whole for stream in self.load.streams), "there must have been streams"

    def _check_copy(self) -> None:
        """Numbered lines in the copy: from 1 on, none missing, none twice. A kill between the write of a line and the
        note of it doubles that one (store/copied.py)."""
        seen: dict[str, list[int]] = defaultdict(list)
        for log, number in _NUMBERED.findall(self.it.output.read_text(errors="replace")):
            seen[log].append(int(number))
        doubled = 0
        for log, numbers in seen.items():
            once = sorted(set(numbers))
            missing = sorted(set(range(1, once[-1] + 1)) - set(once))
            assert not missing, f"lines of {log} are missing in the copy: {missing[:5]} ({len(missing)})"
            assert numbers == sorted(numbers), f"lines of {log} are out of order in the copy"
            doubled += len(numbers) - len(once)
        assert doubled <= self.kills, f"{doubled} lines were doubled by {self.kills} kills"


@contextmanager
def mortal() -> Iterator[Mortal]:
    """A started instance whose state directory is a disk of its own."""
    folder = Path(tempfile.mkdtemp(prefix="vs-", dir="/tmp"))
    state = folder / "state"
    it = DaemonProcess(folder, ladder="")
    try:
        state.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(state)], check=True)
        _write(it)
        it.start()
        one = Mortal(it)
        try:
            yield one
        finally:
            one.load.stop()
    finally:
        try:
            it.close()
        finally:
            subprocess.run(["umount", str(state)], check=False)
            shutil.rmtree(folder)


def _write(it: DaemonProcess) -> None:
    text = it.policy.read_text()
    stand_in = '"-m", "supervisord_vllm.simulation", "serve"'
    assert stand_in in text
    text = text.replace(stand_in, f'{json.dumps(str(NUMBERED))}, "serve"')
    text = text.replace("[engine.env]", f'[engine.env]\nNUMBERED_FOLDER = "{it.folder}"')
    text = text.replace("[restart]\n", "[restart]\nbudget = 100\nplanned-per-day = 1000\n")
    assert "concurrency = 0" in text, "a burst would wait for the load to end"
    card = it.folder / "card.toml"
    card.write_text(f'{card.read_text()}token = "{TOKEN}"\n')
    text += '[stop]\ngrace = "2s"\ndrain = "1s"\n'
    it.policy.write_text(text)


def play(seeds: Sequence[int]) -> list[str]:
    """A campaign: one instance lives through a round for each seed; its rounds in words. Raises `AssertionError`."""
    told: list[str] = []
    try:
        with mortal() as one:
            told.extend(f"seed {seed}: {one.live_through(round_of(seed))}" for seed in seeds)
            one.end()
    except AssertionError as error:
        raise AssertionError("\n".join([*told, f"after that, in seeds {seeds[0]}-{seeds[-1]}: {error}"])) from error
    return told


def main() -> int:
    """Rounds that have not passed yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--done", type=Path, help="one passed seed a line; without it nothing is kept")
    given = parser.parse_args()
    if "DEATHS_MOUNTS" not in os.environ:  # mounts of ours must not be seen by anybody else, nor stay
        if os.geteuid() != 0:
            print("rounds with a full disk mount a tmpfs: run this as root", file=sys.stderr)
            return 2
        os.environ["DEATHS_MOUNTS"] = "private"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv])  # noqa: S606 - no shell
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    done: Path | None = given.done
    passed = {int(line) for line in done.read_text().split()} if done is not None and done.exists() else set()
    for first in range(given.first, given.first + given.rounds, CAMPAIGN):
        seeds = range(first, min(first + CAMPAIGN, given.first + given.rounds))
        if passed.issuperset(seeds):
            continue
        print(*play(seeds), sep="\n", flush=True)
        if done is not None:
            with done.open("a") as file:
                file.writelines(f"{seed}\n" for seed in seeds)
                file.flush()
                os.fsync(file.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
