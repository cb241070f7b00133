"""What a daemon gives to the one that replaces it in the same process (execve): its state, locks and sockets.

The pid stays, and with it the children, their exit statuses and the subreaper. The document lies in memory (memfd), so
that a full or hung disk has no say; every descriptor in it survives the execve because it is said to, one by one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

HANDOVER = "SUPERVISE_HANDOVER"
"""Names the descriptor of the document, to the process that replaces us."""
TRIAL = "SUPERVISE_UPGRADE_TRIAL"
"""Names our state directory to a process that only says whether it could take over."""
LARGEST = 64 << 20
TRIAL_S = 60.0
"""A program that has not said within this that it can take over does not."""


@dataclass(frozen=True, slots=True)
class Handover:
    """``carried`` is the state as text, ``devices`` are those whose locks are held; the rest are descriptors."""

    carried: str
    state_lock: tuple[int, ...]
    device_locks: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    control: int | None = None
    http: tuple[int, ...] = ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Everything that must stay open."""
        control = () if self.control is None else (self.control,)
        return (*self.state_lock, *self.device_locks, *control, *self.http)


def give(handover: Handover, environ: MutableMapping[str, str]) -> None:
    """Write the document and let it, and the descriptors in it, survive an execve."""
    document = os.memfd_create("vllm-supervise-handover", 0)
    data = memoryview(json.dumps(asdict(handover)).encode())
    while data:
        data = data[os.write(document, data) :]
    for descriptor in handover.descriptors:
        os.set_inheritable(descriptor, True)
    environ[HANDOVER] = str(document)


def take(environ: MutableMapping[str, str]) -> Handover | None:
    """What a daemon before us in this process gave; ``None`` where there was none. No engine inherits any of it."""
    named = environ.pop(HANDOVER, "")
    if not (named.isascii() and named.isdigit()):
        return None
    try:
        data = os.pread(int(named), LARGEST, 0)
        os.close(int(named))
        handover = _read(json.loads(data))
        for descriptor in handover.descriptors:
            os.set_inheritable(descriptor, False)
    except (OSError, ValueError, TypeError):
        return None
    return handover


def _read(document: Any) -> Handover:  # noqa: ANN401 - JSON of another version
    known = {field.name for field in fields(Handover)}
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in document.items() if key in known
    }
    return Handover(**given)


class TrialError(Exception):
    """The program that would take over does not; the text is one line that says why."""


def try_command(carried: str, environ: MutableMapping[str, str], state_dir: Path, timeout_s: float = TRIAL_S) -> str:
    """Let the program that would take over say that it can: it reads its policy and our state, no more. Its version.

    Raises:
        TrialError: it cannot, or says nothing within ``timeout_s`` seconds.
    """
    argv = command()
    try:
        tried = subprocess.run(
            argv,
            env={**environ, TRIAL: str(state_dir)},
            input=carried.encode(),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TrialError(f"{argv[0]} says nothing within {timeout_s:g} s") from None
    except OSError as error:
        raise TrialError(f"cannot execute {argv[0]}: {error.strerror}") from error
    if tried.returncode != 0:
        lines = tried.stderr.decode("utf-8", "replace").strip().splitlines()
        raise TrialError(lines[-1] if lines else f"{argv[0]} ended with {tried.returncode}")
    try:
        return str(json.loads(tried.stdout)["version"])
    except (ValueError, KeyError, TypeError):
        raise TrialError(f"{argv[0]} is no vllm-supervise that can take over") from None


def command() -> list[str]:
    """How this daemon was started, word for word: the program behind the path may have changed since."""
    return list(sys.orig_argv)
