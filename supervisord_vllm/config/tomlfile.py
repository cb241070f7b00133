"""A TOML file with the line of every key.

The standard library reads values but not places. The scanner here walks the same text again *after* it was found
valid, so it needs no grammar checks: it only steps over strings, arrays and tables and notes where each key and item
begins.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supervisord_vllm.config.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KeyPath = tuple["str | int", ...]

LARGEST = 1 << 20
"""A policy file of more bytes is refused: it is not a policy."""

LONGEST_LINE = 16 << 10
"""Characters; the standard library's parser is quadratic in the parts of a dotted key, so that a line has to be
bounded.
"""

DEEPEST = 16
"""Parts of a dotted key; a policy needs three."""

_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|(end of document))\)$")
_TRIVIA = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_SCALAR = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"""(?:"{0,2})'
    r"|'''(?:[^']|'(?!''))*'''(?:'{0,2})"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\d{4}-\d\d-\d\d[ Tt]\d\d:[^\s,\]}#]+"
    r"|[^\s,\]}#]+",
    re.DOTALL,
)


@dataclass(frozen=True)
class TomlFile:
    """The values of a file and the line (from 1) where each of them is given."""

    path: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)


def read_text(path: Path, what: str) -> str:
    """The text of a small regular UTF-8 file; anything else raises `ConfigError` in one line that names the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not make us wait
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path}: is not a regular file; give the path of {what}")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(LARGEST + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "not a path"
        fix = f"give the path of {what} that this user may read"
        raise ConfigError(f"{_shown(path)}: cannot be read ({reason}); {fix}") from None
    if len(data) > LARGEST:
        raise ConfigError(f"{path}: is larger than 1 MiB; this is not {what}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text; this is not {what}") from None
    if "\0" in text:
        raise ConfigError(
            f"{path}:{text.count(chr(10), 0, text.index(chr(0))) + 1}: is a binary file; this is not {what}"
        )
    return text


def _shown(path: Path) -> str:
    return str(path).replace("\0", "\\0").replace("\n", "\\n")


def read(path: Path) -> TomlFile:
    """Read and scan a TOML file. Errors of syntax name the line."""
    text = read_text(path, "a policy file").replace("\r\n", "\n")
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > LONGEST_LINE:
            raise ConfigError(f"{path}:{number}: the line is longer than 16 KiB; this is not a policy file")
    try:
        values = tomllib.loads(text)
        return TomlFile(path, values, _Scanner(text).scan())
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = _AT.search(message)
        number = int(place[1]) if place and place[1] else text.count("\n") + 1
        column = f" (column {place[2]})" if place and place[2] else ""
        raise ConfigError(
            f"{path}:{number}: not valid TOML: {_AT.sub('', message)[:200]}{column}; correct the line"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply; a policy needs three levels") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {str(error)[:200]}; correct the value") from None


def value_of(text: str) -> object:
    """One value in TOML's notation, ``["a", 1]``; anything else raises ``ValueError``."""
    values = tomllib.loads(f"value = {text}\n")
    if list(values) != ["value"]:
        raise ValueError(f"{text!r} is more than one value")
    return values["value"]


class _Scanner:
    """Notes the line of every key of a text that is known to be valid TOML."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._lines: dict[KeyPath, int] = {}
        self._tables: dict[KeyPath, int] = {}
        """How many elements each array of tables has so far."""

    def scan(self) -> dict[KeyPath, int]:
        prefix: KeyPath = ()
        while self._skip():
            if self._text[self._at] == "[":
                prefix = self._header()
            else:
                self._pair(prefix)
        return self._lines

    def _skip(self) -> bool:
        """Step over blanks, newlines and comments; whether anything is left."""
        match = _TRIVIA.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._at < len(self._text)

    def _note(self, path: KeyPath, at: int) -> None:
        line = bisect_right(self._starts, at)
        for length in range(1, len(path) + 1):  # a dotted key also begins its tables
            self._lines.setdefault(path[:length], line)

    def _key(self) -> list[str]:
        parts: list[str] = []
        while match := _KEY.match(self._text, self._at):
            token = match[0]
            self._at = match.end()
            parts.append(_unquoted(token))
            if len(parts) > DEEPEST:
                raise RecursionError
            dot = _DOT.match(self._text, self._at)
            if dot is None:
                break
            self._at = dot.end()
            self._skip()
        return parts

    def _header(self) -> KeyPath:
        start = self._at
        array = self._text.startswith("[[", start)
        self._at += 2 if array else 1
        self._skip()
        parts = self._key()
        path: KeyPath = ()
        for part in parts[:-1]:
            path = (*path, part)
            if path in self._tables:
                path = (*path, self._tables[path] - 1)
        path = (*path, *parts[-1:])
        if array:
            self._note(path, start)
            index = self._tables.get(path, 0)
            self._tables[path] = index + 1
            path = (*path, index)
        self._note(path, start)
        self._skip()
        self._at += 2 if array else 1
        return path

    def _pair(self, prefix: KeyPath) -> None:
        start = self._at
        path = (*prefix, *self._key())
        self._note(path, start)
        self._skip()
        self._at += 1  # the "="
        self._skip()
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opening = self._text[self._at]
        if opening not in "[{":
            match = _SCALAR.match(self._text, self._at)
            self._at = match.end() if match else len(self._text)
            return
        self._at += 1
        index = 0
        while self._skip() and self._text[self._at] not in "]}":
            if self._text[self._at] == ",":
                self._at += 1
            elif opening == "{":
                self._pair(path)
            else:
                self._note((*path, index), self._at)
                self._value((*path, index))
                index += 1
        self._at += 1


def _unquoted(token: str) -> str:
    if token[0] == "'":
        return token[1:-1]
    return str(value_of(token)) if token[0] == '"' else token
