"""Does a release of vLLM still print what the signatures know? Their literals, searched for in its Python source.

A signature whose text is vLLM's own names the source in which it was read and the literals that must be there
(`literals`,
by default its anchor). Literals are looked for in the raw text first, then in the string constants as Python joins them
(implicit concatenation, f-strings with their fields taken out). Nothing of vLLM is imported or run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from supervisord_vllm.engine.signature import Catalogue, Signature, catalogue, release

_VERSION_FILES = ("_version.py", "version.py")
_VERSION = re.compile(
    r"^(?:__version__ = version|version = __version__|__version__|version) = [\"'](\d[\w.+-]{1,60})[\"']", re.MULTILINE
)
_DIST_INFO = re.compile(r"vllm(?:_cpu)?-(\d[\w.+]{1,40})\.dist-info$")
_RANGE = re.compile(r"(?P<first>\d+\.\d+(?:\.\d+)?)?\.\.(?P<last>\d+\.\d+(?:\.\d+)?)?")


class NoVllmError(Exception):
    """The folder holds no vLLM; the message names it and says what to give."""


@dataclass(frozen=True)
class Gone:
    """A signature whose text this release does not have. ``expected`` says that its own range has the release in it."""

    signature: Signature
    missing: tuple[str, ...]
    expected: bool


@dataclass(frozen=True)
class Report:
    """What was found: the release, how many signatures were looked for, and those that are gone."""

    version: str
    checked: int
    gone: tuple[Gone, ...]

    @property
    def unexpected(self) -> tuple[Gone, ...]:
        """Those that are gone although their range says otherwise: the drift."""
        return tuple(gone for gone in self.gone if gone.expected)


def verify(folder: Path, signatures: Catalogue | None = None) -> Report:
    """Look for every literal in an installed or unpacked vLLM. Raises `NoVllmError`."""
    package = _package(folder)
    version = _version(package)
    wanted = [s for s in (signatures or catalogue()).signatures if s.vllms]
    left = {literal for signature in wanted for literal in signature.literals}
    files = [path.read_text("utf-8", "replace") for path in sorted(package.rglob("*.py"))]
    left -= {literal for literal in left if any(literal in text for text in files)}
    if left:
        joined = "\n\1\n".join(_constants(files))
        left = {literal for literal in left if literal not in joined}
    gone = tuple(
        Gone(signature, missing, _in_range(signature.seen, version))
        for signature in wanted
        if (missing := tuple(literal for literal in signature.literals if literal in left))
        and len(missing) == len(signature.literals)
    )
    return Report(version, len(wanted), gone)


def _package(folder: Path) -> Path:
    for candidate in (folder, folder / "vllm"):
        if (candidate / "engine").is_dir() and (candidate / "envs.py").is_file():
            return candidate
    raise NoVllmError(
        f"{folder} holds no vLLM; give the folder of its package (python -c 'import vllm; print(vllm.__path__[0])')"
    )


def _version(package: Path) -> str:
    for name in _VERSION_FILES:
        path = package / name
        match = _VERSION.search(path.read_text("utf-8", "replace")) if path.is_file() else None
        if match is not None:
            return match[1]
    for path in package.parent.glob("*.dist-info"):
        match = _DIST_INFO.search(path.name)
        if match is not None:
            return match[1]
    return "unknown"


def _constants(files: Iterable[str]) -> Iterator[str]:
    """The string constants of Python sources, f-strings with a NUL for each field; files that do not parse are left
    out."""
    for text in files:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "\0"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.value


def _in_range(seen: str, version: str) -> bool:
    """Whether a signature's ``seen`` has this release in it; what names no range is expected everywhere."""
    match = _RANGE.search(seen)
    now = release(version)
    if match is None or not now:
        return True
    first, last = release(match["first"] or "0"), release(match["last"] or "999")
    return first <= now and now[: len(last)] <= last
