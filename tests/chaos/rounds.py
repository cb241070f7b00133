"""Seeded rounds of chaos: a daemon, a rogue engine, an operator and a bystander; what must hold at their end.

As a script it runs rounds that have not run yet and keeps those that passed in a file, so that it can be broken off:
``rounds.py --rounds 500 --done FILE [--first SEED]``. A failing campaign prints its seeds and ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from daemon_process import DaemonProcess, daemon, until
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.state import State
from supervisord_vllm.host import cgroup, procfs
from supervisord_vllm.places import instance
from supervisord_vllm.replay import replay
from supervisord_vllm.store import History

ROGUE = Path(__file__).with_name("rogue.py")
PHASES = ("importing", "weights", "profiling", "capturing")
QUICK_FAULTS = (
    "ignore-signals",
    "escape",
    "escape-bare",
    "multiply",
    "fork-and-die",
    "spam",
    "exit-zero",
    "kill",
    "fatal-line",
    *(f"die-{phase}" for phase in PHASES),
    *(f"wedge-{phase}" for phase in PHASES),
)
SLOW_FAULTS = ("half-open",)
"""Found after 10 s without health: once in a while is enough."""
SURVIVES = frozenset({"", "ignore-signals", "escape", "escape-bare", "multiply"})
"""Faults with which a launch serves on; the others end it."""
OPERATORS = ("stop", "stop-twice", "kill-daemon", "interrupt")
LONGEST_S = 60.0
CAMPAIGN = 5
"""Rounds that one daemon lives through."""


@dataclass(frozen=True)
class Round:
    """One fault and what the operator does after it."""

    fault: str
    operator: str
    delay_s: float


def round_of(seed: int) -> Round:
    """Every quick fault comes within any 17 seeds in a row; what is slow to find, once in 25."""
    rng = random.Random(seed)
    fault = SLOW_FAULTS[0] if seed % 25 == 0 else QUICK_FAULTS[5 * seed % len(QUICK_FAULTS)]
    return Round(fault, rng.choice(OPERATORS), rng.uniform(0, 1))


@contextmanager
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like the engine and is not ours."""
    argv = [sys.executable, "-S", "-c", "import time; time.sleep(600)", "serve", "VLLM::EngineCore"]
    with subprocess.Popen(argv, start_new_session=True, stdin=subprocess.DEVNULL) as process:
        try:
            yield process
            assert process.poll() is None, "a foreign process was hurt"
        finally:
            process.kill()


def play(seeds: Sequence[int]) -> str:
    """A campaign: one daemon lives through a round for each seed; returns it in words. Raises `AssertionError`."""
    rounds = [round_of(seed) for seed in seeds]
    story = f"seeds {seeds[0]}-{seeds[-1]}: " + ", ".join(f"{one.fault}/{one.operator}" for one in rounds)
    faults = [one.fault for one in rounds]
    if not _grouped():  # then nothing proves what has no environment
        faults = ["escape" if fault == "escape-bare" else fault for fault in faults]
    with daemon(ladder="") as it, bystander():
        _write(it, faults)
        it.start()
        try:
            for one in rounds:
                _live_through(it, one)
            _end(it, rounds[-1])
            _check(it)
        except AssertionError as error:
            raise AssertionError(f"{story}: {error}") from error
    return story


def _grouped() -> bool:
    made = cgroup.make("probe.chaos")
    return made is not None and made.remove()


def _write(it: DaemonProcess, faults: list[str]) -> None:
    text = it.policy.read_text()
    stand_in = '"-m", "supervisord_vllm.simulation", "serve"'
    assert stand_in in text
    rogue = {"ROGUE_FOLDER": str(it.folder), "ROGUE_PLAN": json.dumps(faults)}
    env = "\n".join(f"{name} = {json.dumps(value)}" for name, value in rogue.items())
    text = text.replace(stand_in, f'"-S", {json.dumps(str(ROGUE))}, "serve"')
    text = text.replace("[engine.env]", f"[engine.env]\n{env}")
    text = text.replace("[restart]\n", "[restart]\nbudget = 20\n")
    text += '[start]\npatience = "1s"\n[stop]\ngrace = "1s"\ninterrupt = "300ms"\nterminate = "300ms"\n'
    it.policy.write_text(text)


def _starts(it: DaemonProcess) -> int:
    """How many engines have been started."""
    path = it.folder / "starts"
    return path.stat().st_size if path.exists() else 0


def _live_through(it: DaemonProcess, one: Round) -> None:
    """The next launch has the round's fault: with or without it, it must come to serve; then the operator acts."""
    assert it.process is not None
    if one.operator == "interrupt":  # at any moment of the start: that is the point
        time.sleep(one.delay_s)
        # While leftovers of an earlier daemon are ended, a stop is refused: it is asked for again.
        until(lambda: it.verb("stop", status=None).startswith(("stop:", "already")), it.told)
    elif one.fault in SURVIVES:
        it.reaches("serving")
        if one.operator == "kill-daemon":
            it.process.kill()
            it.process.wait()
            it.start()
            return
        it.verb("stop")
        if one.operator == "stop-twice":
            it.verb("stop", status=None)
    else:
        began = _starts(it)
        # Interruptions shift the plan: where no fault is to come, it serves already.
        until(lambda: _starts(it) > began or it.status().get("state") == "serving", it.told, LONGEST_S)
        return
    it.reaches("stopped")
    assert it.marked() == [], "a stop leaves nothing"
    it.verb("start")


def _end(it: DaemonProcess, last: Round) -> None:
    """The last launch is healthy; SIGTERM, or two of them, end everything with status 0."""
    assert it.process is not None
    it.reaches("serving")
    it.process.send_signal(signal.SIGTERM)
    if last.operator == "stop-twice":
        time.sleep(last.delay_s / 4)
        if it.process.poll() is None:
            it.process.send_signal(signal.SIGTERM)
    assert it.wait() == 0


def _check(it: DaemonProcess) -> None:
    """What must hold at the end of every round."""
    ours = instance(it.folder / "state")
    assert it.marked() == [], "processes with our marker are left"
    made = it.folder / "made"
    for pid in map(int, made.read_text().split() if made.exists() else []):
        found = procfs.stat(pid)
        command = " ".join(procfs.cmdline(pid))
        assert found is None or not found.alive or "bytearray" not in command, f"pid {pid} escaped"
    assert not (it.folder / "two-at-once").exists(), "a launch was started beside what another one left"
    own = cgroup.own_group()
    groups = [] if own is None else [path.name for path in own.glob(f"{cgroup.PREFIX}{ours}.*")]
    assert groups == [], "cgroups are left"
    history = History.open(it.folder / "state" / "history.sqlite3")
    if history is None:
        return  # ended before it began
    recorded = [record.decision() for record in history.decisions()]
    again = [decision for run in history.runs() for decision in replay(history, run.run, None, decide, State.initial())]
    history.close()
    assert again == recorded, "replay gives other decisions"


def main() -> int:
    """Rounds that have not passed yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--done", type=Path, required=True, help="one passed seed a line")
    given = parser.parse_args()
    # Broken off by SIGTERM it must end its daemon and the bystander, as it does by Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    passed = {int(line) for line in given.done.read_text().split()} if given.done.exists() else set()
    for first in range(given.first, given.first + given.rounds, CAMPAIGN):
        seeds = range(first, min(first + CAMPAIGN, given.first + given.rounds))
        if passed.issuperset(seeds):
            continue
        begun = time.monotonic()
        print(play(seeds), f"({time.monotonic() - begun:.1f} s)", flush=True)
        with given.done.open("a") as file:
            file.writelines(f"{seed}\n" for seed in seeds)
            file.flush()
            os.fsync(file.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
