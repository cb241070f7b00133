"""Spawning the engine, its environment and log, and seeing its exit."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from family import alive, as_subreaper, family, start, until
from supervisord_vllm.host import process, procfs, tree
from supervisord_vllm.host.exits import Exit
from supervisord_vllm.host.process import SpawnError, new_marker, spawn, wait_exit


@pytest.fixture
def subreaper() -> Iterator[None]:
    with as_subreaper():
        yield


async def _run(folder: Path, code: str, **variables: str) -> tuple[Exit, str]:
    log = folder / "run.log"
    environment = {"PATH": os.environ["PATH"], **variables}
    argv = [sys.executable, "-c", code]
    child = await spawn(argv, environment, cwd=folder, log_path=log, marker=new_marker("aaaa"))
    found = await wait_exit(child)
    assert await tree.end_tree(child) == ()
    return found, log.read_text()


def test_stdout_and_stderr_go_to_one_private_log_in_order(tmp_path: Path) -> None:
    code = "import sys, os\nfor i in range(3): os.write(1, b'out %d\\n' % i); os.write(2, b'err %d\\n' % i)"
    found, text = asyncio.run(_run(tmp_path, code))
    assert found == Exit(code=0)
    assert text.splitlines() == ["out 0", "err 0", "out 1", "err 1", "out 2", "err 2"]
    assert stat.S_IMODE((tmp_path / "run.log").stat().st_mode) == 0o600


def test_a_launch_log_is_appended_to_never_truncated(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("before\n")
    _, text = asyncio.run(_run(tmp_path, "print('after')"))
    assert text == "before\nafter\n"


def test_the_engine_leads_a_session_reads_nothing_and_works_where_it_is_told(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()), os.getcwd())"
    _, text = asyncio.run(_run(tmp_path, code))
    assert text.strip() == f"True '' {tmp_path.resolve()}"


def test_the_engine_inherits_no_descriptor_even_an_inheritable_one(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        _, text = asyncio.run(_run(tmp_path, "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:4])"))
    finally:
        os.close(read)
        os.close(write)
    assert text.strip() == "[0, 1, 2, 3]"  # 3 is the listing's own
    _, text = asyncio.run(
        _run(tmp_path, f"import os\ntry: os.fstat({max(write, 4)}); print('open')\nexcept OSError: print('closed')")
    )
    assert text.endswith("closed\n")


def test_the_engine_always_carries_its_marker_and_keeps_it_readable(tmp_path: Path) -> None:
    code = "import os; e = os.environ; print(e['SUPERVISE_LAUNCH'].partition('.')[0], e['SPT_NOENV'], e['A'])"
    _, text = asyncio.run(_run(tmp_path, code, A="a", SUPERVISE_LAUNCH="other.1", SPT_NOENV=""))
    assert text == "aaaa 1 a\n"


@pytest.mark.parametrize(
    ("argv", "cwd", "wanted"),
    [
        (["{tmp}/no-such-program"], None, "cannot execute {tmp}/no-such-program: No such file or directory"),
        (["{tmp}/plain-file"], None, "cannot execute {tmp}/plain-file: Permission denied"),
        (["{tmp}/garbage"], None, "cannot execute {tmp}/garbage: Exec format error"),
        (["true"], "{tmp}/no-such-folder", "working directory {tmp}/no-such-folder: No such file or directory"),
        (["true", "a\0b"], None, "cannot execute true: embedded null byte"),
        ([], None, "cannot execute the engine: the command is empty"),
    ],
)
def test_what_cannot_be_executed_is_one_line_that_names_it(
    tmp_path: Path, argv: list[str], cwd: str | None, wanted: str
) -> None:
    (tmp_path / "plain-file").write_text("#!/bin/sh\n")
    (tmp_path / "garbage").write_bytes(b"\x01\x02")
    (tmp_path / "garbage").chmod(0o755)

    async def attempt() -> None:
        await spawn(
            [word.format(tmp=tmp_path) for word in argv],
            {"PATH": os.environ["PATH"]},
            cwd=None if cwd is None else Path(cwd.format(tmp=tmp_path)),
            log_path=tmp_path / "run.log",
            marker=new_marker("aaaa"),
        )

    with pytest.raises(SpawnError) as raised:
        asyncio.run(attempt())
    assert str(raised.value) == wanted.format(tmp=tmp_path)


def test_a_log_that_cannot_be_written_is_a_spawn_error(tmp_path: Path) -> None:
    with pytest.raises(SpawnError, match=r"cannot write the launch log .*/none/x\.log: No such file or directory"):
        asyncio.run(spawn(["true"], {}, cwd=None, log_path=tmp_path / "none" / "x.log", marker="a.1"))


@pytest.mark.parametrize(
    ("words", "number", "wanted"),
    [
        (("exit:0",), None, Exit(code=0)),
        (("exit:7",), None, Exit(code=7)),
        ((), signal.SIGKILL, Exit(signal=9)),
        ((), signal.SIGTERM, Exit(signal=15)),
    ],
)
def test_an_exit_is_a_code_or_a_signal(
    tmp_path: Path, words: tuple[str, ...], number: int | None, wanted: Exit
) -> None:
    async def observe() -> tuple[Exit, Exit]:
        async with family(tmp_path, *words) as (child, _):
            if number is not None:
                assert child.send(number)
            return await wait_exit(child), await wait_exit(child)

    assert asyncio.run(observe()) == (wanted, wanted)


def test_an_exit_is_seen_within_ten_milliseconds(tmp_path: Path) -> None:
    async def once() -> float:
        async with family(tmp_path) as (child, _):
            child.send(signal.SIGKILL)
            killed = time.monotonic()
            await wait_exit(child)
            return time.monotonic() - killed

    async def best() -> float:
        return min([await once() for _ in range(5)])  # the quickest: the machine may be busy, the code may not poll

    assert asyncio.run(best()) < 0.010


def test_cancelling_one_waiter_leaves_the_exit_to_the_others(tmp_path: Path) -> None:
    async def observe() -> Exit:
        async with family(tmp_path) as (child, _):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wait_exit(child), 0.01)
            child.send(signal.SIGKILL)
            return await wait_exit(child)

    assert asyncio.run(observe()) == Exit(signal=9)


@pytest.mark.usefixtures("subreaper")
def test_orphans_are_adopted_and_collected_without_stealing_a_status(tmp_path: Path) -> None:
    """The main process and the daemon's own subprocesses keep their status; only an escaped orphan is collected."""

    async def observe() -> None:
        async with family(tmp_path, "escape") as (child, pids):
            helper = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(3)")
            orphan = pids["escaped"]
            await until(lambda: _parent(orphan) == os.getpid(), "the orphan is adopted")
            assert child.send(signal.SIGKILL)
            os.kill(orphan, signal.SIGKILL)
            await until(lambda: not alive(orphan) and not alive(child.pid), "both have ended")
            assert process.reap_orphans() == [orphan]
            assert procfs.stat(orphan) is None
            assert procfs.stat(child.pid) is not None  # still a zombie: its number stays taken until the tree has ended
            assert await wait_exit(child) == Exit(signal=9)
            assert await helper.wait() == 3
            assert await tree.end_tree(child) == ()
            assert procfs.stat(child.pid) is None

    asyncio.run(observe())


@pytest.mark.usefixtures("subreaper")
def test_orphans_are_collected_when_they_end(tmp_path: Path) -> None:
    async def observe() -> None:
        loop = asyncio.get_running_loop()
        process.watch_orphans(loop)
        try:
            async with family(tmp_path, "escape") as (_, pids):
                await until(lambda: _parent(pids["escaped"]) == os.getpid(), "the orphan is adopted")
                os.kill(pids["escaped"], signal.SIGKILL)
                await until(lambda: procfs.stat(pids["escaped"]) is None, "its zombie is gone")
        finally:
            loop.remove_signal_handler(signal.SIGCHLD)

    asyncio.run(observe())


def test_a_spawn_that_is_cancelled_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    real = process._start

    def slow(*arguments: object) -> tuple[int, int, int]:
        made = real(*arguments)  # type: ignore[arg-type]
        started.append(made[0])
        time.sleep(0.2)
        return made

    monkeypatch.setattr(process, "_start", slow)

    async def attempt() -> None:
        task = asyncio.create_task(start(tmp_path))
        await until(lambda: bool(started), "the process was made")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: procfs.stat(started[0]) is None, "the process is gone")

    asyncio.run(attempt())


def _parent(pid: int) -> int:
    found = procfs.stat(pid)
    return found.ppid if found is not None else 0
