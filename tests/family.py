"""Small process families for tests about owning processes: real programs of this interpreter, ended by pid.

``FAMILY`` is a program whose arguments say what it does, in order; it prints ``name pid`` for each process it makes:

    ignore:TERM,INT   ignores signals           child    makes a plain child that sleeps
    escape            double-forks a child into a session of its own, so that its parent is gone
    tracker           a child that looks like multiprocessing's resource tracker and ends when its parent has
    relay             forks and exits, and so does the child, ten times a second
    keep-children     TERM ends the children only; the main process stays
    hold:MIB          holds that much memory    exit:CODE  ends now with this code
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from supervisord_vllm.host import procfs, tree
from supervisord_vllm.host.process import Child, become_subreaper, new_marker, reap_orphans, spawn

FAMILY = r"""
import os, signal, sys, time
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
TRACKER = "from multiprocessing.resource_tracker import main\n"
children, keep = [], []

def say(name, pid):
    print(name, pid, flush=True)

def escape():
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            os.execv(sys.executable, SLEEP)
        say("escaped", pid)
        os._exit(0)
    os.wait()

def end_children(*_):
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

for word in sys.argv[1:]:
    verb, _, value = word.partition(":")
    if verb == "ignore":
        for name in value.split(","):
            signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
    elif verb == "child":
        pid = os.posix_spawn(sys.executable, SLEEP, os.environ)
        children.append(pid)
        say("child", pid)
    elif verb == "escape":
        escape()
    elif verb == "tracker":
        code = TRACKER + "import os, sys, time\nmain, path = int(sys.argv[1]), sys.argv[2]\n"
        code += "while os.getppid() == main: time.sleep(0.02)\nopen(path, 'w').close()"
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code, str(os.getpid()), value], os.environ)
        say("tracker", pid)
    elif verb == "relay":
        say("main", os.getpid())
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.1)
            if os.fork():
                os._exit(0)
    elif verb == "keep-children":
        signal.signal(signal.SIGTERM, end_children)
    elif verb == "hold":
        keep.append(bytearray(os.urandom(1 << 20) * int(value)))
    elif verb == "exit":
        sys.exit(int(value))
say("main", os.getpid())
while True:
    time.sleep(60)
"""

PATIENT_S = 30.0
"""How long a condition is awaited before a test fails: generous, for slow machines."""


async def until(condition: Callable[[], bool], what: str) -> None:
    """Awaits a condition, and fails by name."""
    deadline = asyncio.get_running_loop().time() + PATIENT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"did not happen: {what}"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    found = procfs.stat(pid)
    return found is not None and found.alive


async def start(
    folder: Path, *words: str, instance: str | None = None, **variables: str
) -> tuple[Child, dict[str, int]]:
    """A family whose members have all been made, and their pids by name."""
    marker = new_marker(instance or uuid.uuid4().hex[:16])
    log = folder / f"{marker}.log"
    environment = {"PATH": os.environ["PATH"], **variables}
    child = await spawn([sys.executable, "-c", FAMILY, *words], environment, cwd=None, log_path=log, marker=marker)
    try:
        await until(lambda: "main " in log.read_text() or child.exited.done(), f"the family {words} is complete")
    except BaseException:
        await tree.end_tree(child)
        raise
    lines = [line.split() for line in log.read_text().splitlines()]
    return child, {line[0]: int(line[1]) for line in lines if len(line) == 2}


@contextlib.asynccontextmanager
async def family(folder: Path, *words: str, **variables: str) -> AsyncIterator[tuple[Child, dict[str, int]]]:
    """A family that is gone afterwards, whatever the test did; nothing that carries its marker may be left."""
    child, pids = await start(folder, *words, **variables)
    try:
        yield child, pids
    finally:
        for pid in pids.values():
            found = procfs.stat(pid)
            if found is not None:
                tree.send(tree.Identity(pid, found.start_ticks), signal.SIGKILL)
        assert await tree.end_tree(child) == ()
        assert tree.owned(child.instance) == []


@contextlib.contextmanager
def as_subreaper() -> Iterator[None]:
    """This process adopts orphans, as the daemon does; undone afterwards: other tests expect init to do it."""
    become_subreaper()
    try:
        yield
    finally:
        reap_orphans()
        assert ctypes.CDLL(None).prctl(36, 0, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER


@contextlib.contextmanager
def stranger(*argv: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not ours, in a session of its own; its standard input stays open and empty."""
    with subprocess.Popen(
        argv or [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, **variables},
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
