"""``logs``: what the engine of a launch printed, from its log file; no daemon is needed.

Secrets are taken out by name and form, and with ``--config`` also those that the policy knows. Control characters are
written out, a line is at most 64 KiB, and where the daemon gave up a part of the log one line says how much. Nothing
here imports aiohttp, pydantic, structlog or pynvml without ``--config``.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from supervisord_vllm.cli.daemon import fail
from supervisord_vllm.cli.instance import ConfigOption, InstanceError, NameOption, StateDirOption, find
from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.holes import DataReader
from supervisord_vllm.inotify import CREATED, MODIFIED, MOVED_HERE, Watch
from supervisord_vllm.redaction import Redactor, printable
from supervisord_vllm.store.launch_logs import launch_log, launch_numbers

LONGEST_LINE: Final = 64 << 10
_READ: Final = 256 << 10
_LOOK_AGAIN_S: Final = 1.0
"""Between two looks where nothing is announced (a network file system, say)."""


def logs(
    launch: Annotated[int | None, typer.Option("--launch", min=1, help="The launch; default: the last.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay and print what comes, of the launches after this one too.")
    ] = False,
    name: NameOption = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Print what the engine of a launch printed."""
    try:
        instance = find(name, config, state_dir)
    except InstanceError as error:
        fail(str(error), error.code)
    directory = instance.state_dir / "launches"
    number = _chosen(directory, instance.name, launch)
    printer = _Printer(_cleaning(config))
    try:
        if follow:
            _follow(directory, number, printer, only=launch is not None)
        else:
            with _opened(directory, number) as reader:
                printer.drain(reader)
                printer.finish()
    except KeyboardInterrupt:
        return


def _chosen(directory: Path, name: str, launch: int | None) -> int:
    try:
        next(directory.iterdir(), None)
    except PermissionError:
        fail(f"{directory}: not readable for this user; run as its owner or root", ExitCode.REFUSED)
    except OSError:
        pass  # then there are no logs
    numbers = launch_numbers(directory)
    if not numbers:
        fail(f"{name}: no launch has a log in {directory}", ExitCode.REFUSED)
    if launch is not None and launch not in numbers:
        fail(f"launch {launch} has no log; there are those of {spans(numbers)}", ExitCode.REFUSED)
    return launch or numbers[-1]


def spans(numbers: list[int]) -> str:
    """Ascending numbers in words: ``1-3, 7``."""
    ends: list[tuple[int, int]] = []
    for number in numbers:
        if ends and number == ends[-1][1] + 1:
            ends[-1] = (ends[-1][0], number)
        else:
            ends.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def _cleaning(config: Path | None) -> Callable[[str], str]:
    if config is None:
        return Redactor().text
    from supervisord_vllm.config import ConfigError, load

    try:
        return Redactor(load(config, environ=os.environ).secrets).text
    except ConfigError as error:
        shown = printable(str(error).splitlines()[0])
        print(f"vllm-supervise: the policy's own secrets are not known ({shown})", file=sys.stderr)
        return Redactor().text


def _given_up(size: int) -> bytes:
    return b"vllm-supervise: %d bytes of this log were given up for space\n" % size


@contextmanager
def _opened(directory: Path, number: int) -> Iterator[DataReader]:
    path = launch_log(directory, number)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        fail(f"{path}: not readable for this user; run as its owner or root", ExitCode.REFUSED)
    except OSError as error:
        fail(f"{path}: {error.strerror}", ExitCode.REFUSED)
    try:
        yield DataReader(file, _given_up)
    finally:
        os.close(file)


class _Printer:
    """Lines to standard output, in bounded memory."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._rest = bytearray()
        self._out = sys.stdout.buffer

    def drain(self, reader: DataReader) -> None:
        """Print all whole lines that there are now. Raises `BrokenPipeError` once nobody reads."""
        while data := reader.read(_READ):
            *ended, last = data.split(b"\n")
            for piece in ended:
                self._add(piece)
                self._end_line()
            self._add(last)
        self._out.flush()

    def finish(self) -> None:
        """Print the torn last line, if there is one."""
        if self._rest:
            self._end_line()
        self._out.flush()

    def _add(self, piece: bytes) -> None:
        # Cut for good only after redaction: half a secret is no longer recognised.
        self._rest += piece[: max(0, 4 * LONGEST_LINE - len(self._rest))]

    def _end_line(self) -> None:
        text = printable(self._rest.decode("utf-8", "backslashreplace").rstrip("\r"))
        self._rest.clear()
        self._out.write(self._clean(text)[:LONGEST_LINE].encode("utf-8", "backslashreplace") + b"\n")


def _follow(directory: Path, number: int, printer: _Printer, *, only: bool) -> None:
    """Print what comes until the terminal or the reader ends it, or, of one launch only, a later one has begun."""
    watch = Watch()
    watch.add(directory, CREATED | MOVED_HERE)
    try:
        while True:
            with _opened(directory, number) as reader:
                watch.add(launch_log(directory, number), MODIFIED)
                while True:
                    watch.clear()
                    # Asked before reading: a launch begins when the one before it has written its last.
                    later = [other for other in launch_numbers(directory) if other > number]
                    printer.drain(reader)
                    if later:
                        break
                    _wait(watch)
                printer.finish()
            if only:
                return
            number = later[0]
            print(f"vllm-supervise: launch {number}", file=sys.stderr, flush=True)
    finally:
        watch.close()


def _wait(watch: Watch) -> None:
    """Until something changed or a second has passed. Raises `BrokenPipeError` where nobody reads our output any more,
    which no write would tell as long as the engine is silent.
    """
    poll = select.poll()
    if watch.fileno() >= 0:
        poll.register(watch.fileno(), select.POLLIN)
    with contextlib.suppress(OSError, ValueError):
        poll.register(sys.stdout.fileno(), 0)
    for descriptor, event in poll.poll(_LOOK_AGAIN_S * 1000):
        if descriptor != watch.fileno() and event & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            raise BrokenPipeError
