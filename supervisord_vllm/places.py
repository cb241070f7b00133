"""Where an instance keeps its state and its socket, from its name and the environment alone (standard library only).

systemd's ``$STATE_DIRECTORY`` and ``$RUNTIME_DIRECTORY`` win; root without them uses /var/lib and /run; everybody else
the XDG folders. Of several folders in systemd's variables (separated by colons) the first counts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

PRODUCT = "vllm-supervise"
SOCKET = "control.sock"
STORE = "history.sqlite3"
INSTANCE_META = "instance"
"""The store's meta value ``{"name": …, "runtime_dir": …}``: what ``--state-dir`` alone cannot know."""


def state_dir(name: str, environ: Mapping[str, str]) -> tuple[Path, str]:
    """The state directory of an instance and the origin of that value (``default`` or ``environment NAME``).

    Raises:
        ValueError: where neither systemd, root nor a home directory says where it could be.
    """
    given = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given), "environment STATE_DIRECTORY"
    if os.geteuid() == 0:
        return Path("/var/lib") / PRODUCT / name, "default"
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / PRODUCT / name, "environment XDG_STATE_HOME"
    if environ.get("HOME"):
        return Path(environ["HOME"]) / ".local/state" / PRODUCT / name, "default"
    raise ValueError("cannot be derived: neither STATE_DIRECTORY, XDG_STATE_HOME nor HOME is set")


def runtime_dir(name: str, environ: Mapping[str, str]) -> tuple[Path, str] | None:
    """The runtime directory (the socket's folder) and its origin; ``None`` where this user has none."""
    given = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given), "environment RUNTIME_DIRECTORY"
    if os.geteuid() == 0:
        return Path("/run") / PRODUCT / name, "default"
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / PRODUCT / name, "environment XDG_RUNTIME_DIR"
    return None


def instance(directory: Path) -> str:
    """Who we are to every process that we start: the first 16 hex digits of the hash of the state directory's real
    path.
    """
    return hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:16]
