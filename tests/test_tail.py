"""Reading the engine's output while it is written."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisord_vllm.engine import tail as module
from supervisord_vllm.engine.tail import LINE_LIMIT, Tail, _Cutter, tail
from supervisord_vllm.holes import punch

PATIENT_S = 30.0


async def _collect(source: Tail) -> list[bytes]:
    return [line async for lines in source for line in lines]


def _whole(path: Path, *, offset: int = 0) -> tuple[list[bytes], Tail]:
    """Everything of a file whose writer has ended."""

    async def read() -> tuple[list[bytes], Tail]:
        stopped = asyncio.Event()
        stopped.set()
        source = tail(path, offset=offset, stopped=stopped)
        return await asyncio.wait_for(_collect(source), PATIENT_S), source

    return asyncio.run(read())


def _while_written(path: Path, write: Callable[[Callable[[bytes], None], list[bytes]], Awaitable[None]]) -> list[bytes]:
    """Runs ``write(append, seen)`` beside a tail, then sets ``stopped``; returns all lines."""

    async def run() -> list[bytes]:
        stopped, seen = asyncio.Event(), list[bytes]()

        async def follow() -> None:
            async for lines in tail(path, stopped=stopped):
                seen.extend(lines)

        def append(data: bytes) -> None:
            with path.open("ab") as file:
                file.write(data)

        follower = asyncio.create_task(follow())
        await asyncio.wait_for(write(append, seen), PATIENT_S)
        stopped.set()
        await asyncio.wait_for(follower, PATIENT_S)
        return seen

    path.touch()
    return asyncio.run(run())


def _descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_lines_arrive_while_the_file_grows_long_before_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FALLBACK_S", 600.0)  # only inotify can wake it

    async def write(append: Callable[[bytes], None], seen: list[bytes]) -> None:
        for number in range(5):
            append(b"line %d\n" % number)
            await _until(lambda: len(seen) == number + 1)  # noqa: B023 - awaited within the round

    assert _while_written(tmp_path / "log", write) == [b"line %d" % number for number in range(5)]


def test_without_inotify_the_file_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FALLBACK_S", 0.02)
    monkeypatch.setattr(module._Announced, "_readable", lambda self: self._watch.clear())

    async def write(append: Callable[[bytes], None], seen: list[bytes]) -> None:
        await asyncio.sleep(0.05)
        append(b"a\n")
        await _until(lambda: seen == [b"a"])

    assert _while_written(tmp_path / "log", write) == [b"a"]


def test_a_line_is_delivered_once_it_is_whole(tmp_path: Path) -> None:
    async def write(append: Callable[[bytes], None], seen: list[bytes]) -> None:
        append(b"first\nhal")
        await _until(lambda: seen == [b"first"])
        append(b"f\n")
        await _until(lambda: seen == [b"first", b"half"])

    assert _while_written(tmp_path / "log", write) == [b"first", b"half"]


def test_after_the_stop_everything_is_read_a_torn_last_line_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\n\nprogress 1%\rprogress 2%\r\nb\xff\0\ntorn")
    lines, source = _whole(path)
    assert lines == [b"a", b"", b"progress 1%\rprogress 2%\r", b"b\xff\0", b"torn"]
    assert source.offset == source.read_bytes == path.stat().st_size
    path.write_bytes(b"")
    assert _whole(path)[0] == []


def test_reading_goes_on_at_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthr")

    async def first() -> int:
        stopped = asyncio.Event()
        source = tail(path, stopped=stopped)
        async for lines in source:
            assert lines == [b"one", b"two"]
            break
        return source.offset

    offset = asyncio.run(first())
    assert offset == 8
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert _whole(path, offset=offset)[0] == [b"three"]


def test_a_long_line_is_cut_counted_and_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\n" + b"x" * LINE_LIMIT + b"\n" + b"y" * (3 * LINE_LIMIT + 7) + b"\nz\n")
    lines, source = _whole(path)
    assert [len(line) for line in lines] == [1, LINE_LIMIT, LINE_LIMIT, 1]
    assert lines[-1] == b"z"
    assert (source.cut_lines, source.dropped_bytes) == (1, 2 * LINE_LIMIT + 7)


def test_a_line_without_end_is_delivered_at_its_limit(tmp_path: Path) -> None:
    async def write(append: Callable[[bytes], None], seen: list[bytes]) -> None:
        append(b"x" * (LINE_LIMIT + 1))
        await _until(lambda: len(seen) == 1)
        append(b"more\nnext\n")
        await _until(lambda: len(seen) == 2)

    assert [line[:4] for line in _while_written(tmp_path / "log", write)] == [b"xxxx", b"next"]


def test_two_hundred_thousand_lines_do_not_starve_the_loop(tmp_path: Path) -> None:
    path = tmp_path / "log"
    wanted = [b"INFO 12-01 11:22:33 [loggers.py:%d] Engine 000: Avg generation throughput" % n for n in range(200_000)]
    path.write_bytes(b"\n".join(wanted) + b"\n")

    async def read() -> tuple[int, float]:
        stopped = asyncio.Event()
        stopped.set()
        count, longest = 0, 0.0
        done = asyncio.Event()

        async def heartbeat() -> None:
            nonlocal longest
            while not done.is_set():
                before = time.monotonic()
                await asyncio.sleep(0)
                longest = max(longest, time.monotonic() - before)

        beating = asyncio.create_task(heartbeat())
        async for lines in tail(path, stopped=stopped):
            assert lines == wanted[count : count + len(lines)]
            count += len(lines)
        done.set()
        await beating
        return count, longest

    began = time.monotonic()
    count, longest = asyncio.run(read())
    assert count == 200_000
    assert longest < 0.5  # a whole pass in one turn takes longer than that only on a stalled machine
    assert time.monotonic() - began < PATIENT_S


def test_a_writer_that_goes_on_after_the_stop_cannot_hold_it_up(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\n")

    async def read() -> list[bytes]:
        stopped = asyncio.Event()
        stopped.set()
        seen: list[bytes] = []
        async for lines in tail(path, stopped=stopped):
            seen += lines
            with path.open("ab") as file:
                file.write(b"endless\n")
        return seen

    assert asyncio.run(asyncio.wait_for(read(), PATIENT_S)) == [b"a"]


def test_a_missing_file_is_said_and_a_cancelled_tail_leaves_no_descriptor(tmp_path: Path) -> None:
    async def observe() -> None:
        with pytest.raises(FileNotFoundError):
            await _collect(tail(tmp_path / "none", stopped=asyncio.Event()))
        (tmp_path / "log").write_bytes(b"a\n")
        before = _descriptors()
        task = asyncio.create_task(_collect(tail(tmp_path / "log", stopped=asyncio.Event())))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        deadline = time.monotonic() + PATIENT_S
        while _descriptors() != before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    asyncio.run(observe())


@given(
    st.binary(max_size=400).map(lambda data: data.replace(b"\x01", b"\n")), st.lists(st.integers(0, 400), max_size=8)
)
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, cuts: list[int]) -> None:
    cutter, lines, places = _Cutter(), list[bytes](), sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for begin, end in pairwise(places):
        lines += cutter.feed(data[begin:end])
    lines += cutter.finish()
    wanted = data.split(b"\n")
    assert lines == (wanted if wanted[-1] else wanted[:-1])


def test_every_line_comes_with_the_position_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n\n" + b"x" * (LINE_LIMIT + 10) + b"\nthree\ntorn")

    async def read() -> list[tuple[bytes, int]]:
        stopped = asyncio.Event()
        stopped.set()
        return [pair async for lines in tail(path, stopped=stopped) for pair in zip(lines, lines.ends, strict=True)]

    cut = 5 + LINE_LIMIT
    assert asyncio.run(read()) == [
        (b"one", 4),
        (b"", 5),
        (b"x" * LINE_LIMIT, cut),
        (b"three", cut + 10 + 7),
        (b"torn", cut + 10 + 11),
    ]


@given(
    st.lists(st.sampled_from([b"a", b"bb", b"x" * (LINE_LIMIT + 3), b"", b"y" * LINE_LIMIT]), min_size=1, max_size=6),
    st.lists(st.integers(1, 2 * LINE_LIMIT), max_size=4),
)
def test_reading_from_any_lines_position_gives_what_comes_after_it(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"\n".join(pieces) + b"\n"
    cutter, lines, ends = _Cutter(), list[bytes](), list[int]()
    for begin, end in pairwise(sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})):
        batch = cutter.feed(data[begin:end])
        lines += batch
        ends += batch.ends
    for index, end in enumerate(ends, 1):
        again = _Cutter(end, within_line=data[end - 1 : end] != b"\n").feed(data[end:])
        assert (again, again.ends) == (lines[index:], ends[index:])


def test_a_hole_is_no_text_and_moves_no_position(tmp_path: Path) -> None:
    path = tmp_path / "log"
    wanted = [b"line %06d of the engine's output" % number for number in range(20_000)]
    path.write_bytes(b"\n".join(wanted) + b"\n")
    ends = dict(zip(wanted, range(len(wanted[0]) + 1, 1 << 30, len(wanted[0]) + 1), strict=False))
    file = os.open(path, os.O_RDWR)
    hole = punch(file, 100_000, 400_000)
    os.close(file)
    assert 0 < hole[1] - hole[0] < 300_000

    async def read(offset: int) -> tuple[list[tuple[bytes, int]], int]:
        stopped = asyncio.Event()
        stopped.set()
        source = tail(path, offset=offset, stopped=stopped)
        return [pair async for lines in source for pair in zip(lines, lines.ends, strict=True)], source.punched_bytes

    seen, punched = asyncio.run(read(0))
    assert punched == hole[1] - hole[0]
    (torn,) = [pair for pair in seen if pair[0] not in ends]
    assert torn[1] == hole[0]
    assert any(line.startswith(torn[0]) for line in wanted)
    whole = [pair for pair in seen if pair != torn]
    assert whole == [(line, end) for line, end in ends.items() if end <= hole[0] or end - len(line) > hole[1]]
    within = asyncio.run(read((hole[0] + hole[1]) // 2))[0]
    assert within == [pair for pair in whole if pair[1] > hole[1]]


def test_a_part_that_is_omitted_is_passed_over_like_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%06d\n" % number for number in range(100_000)))

    async def read(omit: tuple[int, int]) -> list[tuple[bytes, int]]:
        stopped = asyncio.Event()
        stopped.set()
        source = tail(path, stopped=stopped, omit=omit)
        return [pair async for lines in source for pair in zip(lines, lines.ends, strict=True)]

    everything = [(b"%06d" % number, 7 * number + 7) for number in range(100_000)]
    assert asyncio.run(read((0, 0))) == asyncio.run(read((1000, 10))) == everything
    seen = asyncio.run(read((70_003, 600_002)))
    assert seen == [*everything[:10_000], (b"010", 70_003), *everything[85_715:]]
