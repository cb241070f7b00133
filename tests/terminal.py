"""A program on a terminal of its own: a pty, and a screen that understands what our view sends and nothing else."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from daemon_process import until

_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
_OWN = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
"""Makes the terminal its own, so that Ctrl-C reaches it."""


class Screen:
    """Lines of characters. ``other`` tells whether the other screen is shown, ``cursor`` whether there is one."""

    def __init__(self) -> None:
        self.lines: dict[int, dict[int, str]] = {}
        self.other = False
        self.cursor = True
        self.was_other = False
        self.unknown: list[str] = []
        self._main: dict[int, dict[int, str]] = {}
        self._at = [0, 0]
        self._rest = ""

    def feed(self, text: str) -> None:
        """What the program wrote."""
        text, self._rest = self._rest + text, ""
        place = 0
        while place < len(text):
            found = _SEQUENCE.match(text, place)
            if found:
                self._told(found[1], found[2])
                place = found.end()
            elif text[place] == "\x1b":
                if len(text) - place < 16:
                    self._rest = text[place:]
                    return
                self.unknown.append(text[place : place + 8])
                place += 1
            else:
                self._write(text[place])
                place += 1

    def text(self) -> str:
        """What a person sees."""
        last = max(self.lines, default=-1)
        return "\n".join(
            "".join(line.get(x, " ") for x in range(max(line, default=-1) + 1)).rstrip()
            for line in (self.lines.get(y, {}) for y in range(last + 1))
        )

    def _told(self, numbers: str, what: str) -> None:
        if what == "H":
            row, column = ([int(number or 1) for number in numbers.split(";")] + [1, 1])[:2]
            self._at = [column - 1, row - 1]
        elif numbers == "?1049" and what in "hl":
            self.other = what == "h"
            self.was_other = self.was_other or self.other
            if self.other:
                self._main, self.lines = self.lines, {}
            else:
                self.lines = self._main
                self._at = [0, max(self.lines, default=-1) + 1]
        elif numbers == "?25" and what in "hl":
            self.cursor = what == "h"
        elif what != "m" and not numbers.startswith("?2004"):  # a shell's bracketed paste
            self.unknown.append(numbers + what)

    def _write(self, character: str) -> None:
        if character == "\n":
            self._at = [0, self._at[1] + 1]
        elif character == "\r":
            self._at[0] = 0
        elif character == "\a":
            pass
        else:
            self.lines.setdefault(self._at[1], {})[self._at[0]] = character
            self._at[0] += 1


class Terminal:
    """A program on a pty of ``size`` (columns, lines); end it with `close`, or as a context."""

    def __init__(
        self, command: Sequence[str], size: tuple[int, int], environ: Mapping[str, str | None] | None = None
    ) -> None:
        self.screen = Screen()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        self.resize(*size)
        changed = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": None, "NO_COLOR": None, **(environ or {})}
        whole = {**os.environ, **{name: value for name, value in changed.items() if value is not None}}
        for name in (name for name, value in changed.items() if value is None):
            whole.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=whole,
            start_new_session=True,
            cwd=Path(__file__).parent.parent,
        )
        os.close(slave)

    def __enter__(self) -> Terminal:  # noqa: PYI034 - no subclasses
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def resize(self, columns: int, lines: int) -> None:
        """Another size; the kernel tells the program."""
        self.screen.lines.clear()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def press(self, keys: str) -> None:
        """What a person types."""
        os.write(self._master, keys.encode())

    def read(self) -> str:
        """Take what was written; the screen as it is now."""
        try:
            while data := os.read(self._master, 65536):
                self.screen.feed(self._decoder.decode(data))
        except BlockingIOError:
            pass
        except OSError:  # nobody has the other end open any more
            pass
        return self.screen.text()

    def shows(self, *words: str) -> str:
        """Wait until all of the words are on the screen."""

        def there() -> str | None:
            text = self.read()
            return text if all(word in text for word in words) else None

        return until(there, lambda: f"{words} on:\n{self.screen.text()}")

    def comes(self, condition: Callable[[], bool]) -> None:
        """Wait for something else, with the screen read meanwhile."""
        until(lambda: (self.read(), condition())[1] or None, self.screen.text)

    def ended(self) -> int:
        """Wait for the end; the exit status."""
        self.comes(lambda: self.process.poll() is not None)
        self.read()
        assert self.process.returncode is not None
        return self.process.returncode

    def close(self) -> None:
        """End the program if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
