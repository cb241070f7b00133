"""How quickly the daemon sees and acts: medians of one run, on a stand-in engine that does nothing by itself.

``.venv/bin/python benchmarks/latency.py [--rounds 11]`` prints a table: what, the median, the goal. Never a gate: a
busy machine gives other figures. The four spans:

* an exit is noticed: from SIGKILL to the fact;
* a fatal line takes readiness away: from the write to /readyz 503 (asked every millisecond);
* exit and end of output to the decision;
* the decision to the next spawn, where the gate is open and no back-off is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sqlite3
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from daemon_process import DaemonProcess, daemon, until  # noqa: E402 - the path comes first

GOALS_MS = {
    "exit noticed": 10.0,
    "fatal line to not ready": 100.0,
    "exit and end of output to decision": 100.0,
    "decision to next spawn, gate open": 300.0,
}


def prepare(it: DaemonProcess) -> None:
    """The rogue engine without a fault, no back-off, the shortest gate."""
    text = it.policy.read_text()
    rogue = json.dumps(str(ROOT / "tests/chaos/rogue.py"))
    text = text.replace('"-m", "supervisord_vllm.simulation", "serve"', f'"-S", {rogue}, "serve"')
    text = text.replace("[engine.env]", f'[engine.env]\nROGUE_FOLDER = "{it.folder}"\nROGUE_PLAN = "[]"')
    text = text.replace('first = "100ms"', 'first = "0s"').replace('max = "1s"', 'max = "0s"')
    it.policy.write_text(text.replace("[restart]\n", "[restart]\nbudget = 1000\nmax-launches = 1000\n"))


def at(it: DaemonProcess, kind: str, launch: int) -> int:
    """When a fact of a launch was seen (CLOCK_BOOTTIME, ns)."""
    with contextlib.closing(sqlite3.connect(f"file:{it.folder}/state/history.sqlite3?mode=ro", uri=True)) as store:
        rows = store.execute("SELECT json FROM facts WHERE type = ? AND launch = ?", (kind, launch)).fetchall()
    return int(json.loads(rows[0][0])["at_ns"])


def measure(it: DaemonProcess, launch: int) -> dict[str, float]:
    """One round: a fatal line, then a SIGKILL; milliseconds by span."""
    found = it.reaches("serving", launch)
    pid = found["launch"]["pid"]
    begun = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    os.kill(pid, signal.SIGUSR1)
    while it.http_get("/readyz")[0] == 200:
        time.sleep(0.001)
    unready = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    killed = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    os.kill(pid, signal.SIGKILL)
    until(lambda: ((it.status().get("launch") or {}).get("number") or 0) > launch, it.told)
    it.reaches("serving", launch + 1)
    exited, diagnosed = at(it, "Exited", launch), at(it, "Diagnosed", launch)
    spawned = at(it, "Spawned", launch + 1)
    spans = (exited - killed, unready - begun, diagnosed - exited, spawned - diagnosed)
    return {name: span / 1e6 for name, span in zip(GOALS_MS, spans, strict=True)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    with daemon(ladder="") as it:
        prepare(it)
        it.start()
        results = [measure(it, launch) for launch in range(1, rounds + 1)]
    for name, goal in GOALS_MS.items():
        values = sorted(result[name] for result in results)
        print(f"{name:38} median {statistics.median(values):7.1f} ms   worst {values[-1]:7.1f}   goal {goal:5.0f}")


if __name__ == "__main__":
    main()
