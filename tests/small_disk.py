"""A small disk of one's own: a tmpfs in a private mount namespace, which tests may fill."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

_ENTER = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'


def unshare() -> list[str]:
    """The beginning of a command line that runs in a mount namespace of its own."""
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *rights, "--mount", "--propagation", "private"]


@cache
def missing() -> str | None:
    """Why there can be none here, or ``None``."""
    tried = subprocess.run(
        [*unshare(), "sh", "-ec", _ENTER, "disk", "64k", "/mnt", "true"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else f"no tmpfs can be mounted here: {tried.stderr.decode().strip()}"


def command(size: str, folder: str, *argv: str) -> list[str]:
    """A command line that sees a new tmpfs of this size (``16m``) in place of the folder; the pid stays the same."""
    return [*unshare(), "sh", "-ec", _ENTER, "disk", size, folder, *argv]


def python(size: str, folder: str, program: str, *arguments: str, seconds: float = 120.0) -> str:
    """What a Python program prints that runs there; it fails the test by failing."""
    argv = command(size, folder, sys.executable, "-c", program, folder, *arguments)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
