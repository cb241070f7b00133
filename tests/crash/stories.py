"""The stories whose every crash point is tried: a life from first start to stop, what follows a kill, an upgrade.

After a kill the next daemon adopts the engine (``recovery``), or finds that the store is gone, ends the engine and
starts another (``leftovers``).

`points_of` records a story's points; `survive` plays it once more with one of them failing or killing, and asserts that
a daemon (the same one where it was not killed) comes to serve with one engine, and leaves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from crash.nursery import Nursery
from daemon_process import DaemonProcess, daemon, until
from supervisord_vllm.cli.daemon import DaemonError, NoDaemonError, ask
from supervisord_vllm.host import cgroup
from supervisord_vllm.host.lock import LOCK_DIR
from supervisord_vllm.places import SOCKET, STORE, instance
from supervisord_vllm.store import History

POINTS = Path(__file__).with_name("points.py")
ROGUE = POINTS.parents[1] / "chaos" / "rogue.py"
MODES = ("fail", "kill-before", "kill-half", "kill-after")
STORIES = ("life", "recovery", "leftovers", "upgrade")
REFUSED = 78
NURSERY = Nursery()
_CLI = "vllm-supervise"


@dataclass(frozen=True)
class Case:
    """One point of a story, and what happens there."""

    story: str
    point: str
    mode: str

    def __str__(self) -> str:
        return f"{self.story}: {self.mode} at {self.point}"


@contextmanager
def instance_of(story: str) -> Iterator[DaemonProcess]:
    """A daemon on a rogue engine that dies by itself once, a moment after it serves."""
    with daemon(ladder="") as it:
        text = it.policy.read_text()
        stand_in = '"-m", "supervisord_vllm.simulation", "serve"'
        assert stand_in in text
        text = text.replace(stand_in, f'"-S", {json.dumps(str(ROGUE))}, "serve"')
        plan = ["exit-zero"] if story == "life" else []
        env = {"ROGUE_FOLDER": str(it.folder), "ROGUE_PLAN": json.dumps(plan)}
        lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in env.items())
        text = text.replace("[engine.env]", f"[engine.env]\n{lines}").replace("300ms", "50ms").replace("100ms", "50ms")
        text += '[stop]\ngrace = "1s"\ninterrupt = "300ms"\nterminate = "300ms"\n'
        it.policy.write_text(text)
        yield it


def start(it: DaemonProcess, trace: Path, point: str = "", mode: str = "") -> None:
    """Start the daemon with its points counted."""
    roots = [it.folder / "state", it.folder / "run", LOCK_DIR, *_groups()]
    env = {
        **os.environ,
        "CRASH_ROOTS": os.pathsep.join(map(str, roots)),
        "CRASH_TRACE": str(trace),
        "CRASH_AT": point,
        "CRASH_MODE": mode,
    }
    _begin(it, [str(POINTS), "run", "--config", str(it.policy)], env)


def start_again(it: DaemonProcess) -> None:
    """Start a daemon whose points nobody counts."""
    _begin(it, [_CLI, "run", "--config", str(it.policy)], os.environ)


def _begin(it: DaemonProcess, argv: list[str], env: Mapping[str, str]) -> None:
    it.process = cast("subprocess.Popen[str]", NURSERY.start(argv, env, it.output, it.errors))


def _groups() -> list[Path]:
    own = cgroup.own_group()
    return [] if own is None else [own]


def traced(trace: Path) -> list[dict[str, Any]]:
    """The trace's lines."""
    return [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []


def points_of(story: str) -> list[str]:
    """The points of a story, in order. Raises `AssertionError` where a write escapes the count."""
    with instance_of(story) as it:
        trace = it.folder / "trace"
        prepare(it, story)
        start(it, trace)
        _live(it, story)
        assert it.process is not None
        assert it.process.returncode == 0
        check(it)
        lines = traced(trace)
    escaped = {line["escaped"] for line in lines if "escaped" in line}
    assert not escaped, f"written in a way that is no crash point yet: {escaped}"
    return [line["point"] for line in lines if "point" in line]


def cases(story: str) -> list[Case]:
    """Every point with every mode that makes a difference there."""
    found = []
    for point in points_of(story):
        for mode in MODES:
            if mode == "kill-half" and not _does(point, "write"):
                continue
            if mode == "fail" and _does(point, "close database"):
                continue
            found.append(Case(story, point, mode))
    return found


def _does(point: str, what: str) -> bool:
    return point.removeprefix("replaced: ").startswith(f"{what} ")


def survive(case: Case) -> str:
    """Play a case; says what happened. Raises `AssertionError`."""
    begun = time.monotonic()
    with instance_of(case.story) as it:
        trace = it.folder / "trace"
        try:
            prepare(it, case.story)
            start(it, trace, case.point, case.mode)
            _live(it, case.story)
            assert it.process is not None
            told = _after(it, case, traced(trace))
            check(it)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}\n{it.told()}") from error
    return f"{case}: {told} ({time.monotonic() - begun:.1f} s)"


def prepare(it: DaemonProcess, story: str) -> None:
    """What happened before the story: nothing, or a daemon that was killed while its engine served."""
    if story not in ("recovery", "leftovers"):
        return
    start_again(it)
    it.reaches("serving")
    assert it.process is not None
    it.process.kill()
    it.process.wait()
    for file in (it.folder / "state").glob(f"{STORE}*") if story == "leftovers" else ():
        file.unlink()


def _over(it: DaemonProcess) -> bool:
    return it.process is not None and it.process.poll() is not None


def _live(it: DaemonProcess, story: str) -> None:
    """Start to stop; ends early where the daemon does."""
    last = 2 if story in ("life", "leftovers") else 1

    def there() -> bool:
        return _over(it) or (_starts(it) >= last and it.status().get("state") == "serving")

    until(there, lambda: f"{it.status()} {it.told()}")
    if story == "upgrade" and not _over(it):
        with contextlib.suppress(DaemonError, NoDaemonError):  # refused, or killed before it could answer
            ask(it.folder / "run" / SOCKET, "/command", {"verb": "upgrade", "reason": "crash"}, timeout=90)
            until(lambda: _over(it) or it.errors.read_text().count('"event": "supervising"') == 2, it.told)
        until(there, lambda: f"{it.status()} {it.told()}")
    if not _over(it):
        assert it.process is not None
        it.process.send_signal(signal.SIGTERM)
        it.wait()


def _after(it: DaemonProcess, case: Case, lines: list[dict[str, Any]]) -> str:
    """After a kill, or a start that was refused in one line, another daemon comes to serve."""
    assert it.process is not None
    code = it.process.returncode
    if any("killed" in line for line in lines):
        told = "killed, and the next one served"
    elif not any("failed" in line for line in lines):
        assert code == 0
        return "not reached"
    elif code == REFUSED:
        told = "refused in one line, and the next one served"
    else:
        assert code == 0, f"a failing point ends the daemon with {code}"
        if not _does(case.point, "rmdir"):
            return "went on"
        told = "went on, and the next one removed what was left"
    start_again(it)
    it.reaches("serving")
    assert it.term() == 0
    return told


def _starts(it: DaemonProcess) -> int:
    path = it.folder / "starts"
    return path.stat().st_size if path.exists() else 0


def check(it: DaemonProcess) -> None:
    """What holds at the end of every case."""
    assert it.marked() == [], "processes with our marker are left"
    assert not (it.folder / "two-at-once").exists(), "an engine was started beside another one"
    logs = (it.folder / "logs").read_text().split() if (it.folder / "logs").exists() else []
    assert len(logs) == len(set(logs)), f"a launch number was used twice: {logs}"
    own, ours = cgroup.own_group(), instance(it.folder / "state")
    groups = [] if own is None else [path.name for path in own.glob(f"{cgroup.PREFIX}{ours}.*")]
    assert groups == [], "cgroups are left"
    history = History.open(it.folder / "state" / STORE)
    if history is not None:  # refused before it began
        with closing(history):
            decisions, launches = history.decisions(), history.launches()
        unknown = [record.json["number"] for record in decisions if record.outcome is None]
        assert unknown == [], f"decisions without an end: {unknown}"
        numbers = [record.json["number"] for record in decisions]
        assert len(numbers) == len(set(numbers)), f"a decision number was used twice: {numbers}"
        unended = [launch.number for launch in launches if launch.ended_at is None]
        assert unended == [], f"launches without an end: {unended}"
    torn = list((it.folder / "state").glob("*.unreadable-*"))
    assert torn == [], "a store was torn"
