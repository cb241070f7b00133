"""Which instance a client verb means: by ``--name``, ``--config`` or ``--state-dir``, else the only one there is.

Of a policy file only ``name``, ``state-dir`` and ``runtime-dir`` are read, with the drop-ins and the ``SUPERVISE_*``
variables that can change them, by the standard library alone: a broken policy must not keep anyone from its status.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from supervisord_vllm import places
from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.store.history import History
from supervisord_vllm.store.schema import StoreError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST_POLICY = 1 << 20
SYSTEM = (Path("/var/lib"), Path("/run"))

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_KEYS = ("name", "state-dir", "runtime-dir")

NameOption = Annotated[str | None, typer.Option("--name", help="The instance, where there are several.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="The instance's policy file.")]
StateDirOption = Annotated[Path | None, typer.Option("--state-dir", help="The instance's state directory.")]


@dataclass(frozen=True)
class Instance:
    """Where an instance lives."""

    name: str
    state_dir: Path
    runtime_dir: Path

    @property
    def socket(self) -> Path:
        """Its control socket."""
        return self.runtime_dir / places.SOCKET

    @property
    def store(self) -> Path:
        """Its history."""
        return self.state_dir / places.STORE


class InstanceError(Exception):
    """No instance, or not a single one; the message says what to do."""

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


def find(
    name: str | None = None,
    config: Path | None = None,
    state_dir: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Instance:
    """The instance that is meant.

    Raises:
        InstanceError: it cannot be told (usage) or the policy file cannot be read (configuration).
    """
    environ = os.environ if environ is None else environ
    if name is not None and not _NAME.fullmatch(name):
        raise InstanceError(f"--name {name!r} cannot be an instance's name", ExitCode.USAGE)
    if config is not None:
        return _of_config(config, name, state_dir, environ)
    if state_dir is not None:
        return _of_state_dir(state_dir, name, environ)
    if name is not None:
        return _of_name(name, environ)
    if environ.get("STATE_DIRECTORY"):
        return _of_state_dir(places.state_dir("", environ)[0], None, environ)
    known = instances(environ)
    if len(known) == 1:
        return _of_name(known[0], environ)
    if not known:
        message = "no instance is known here; name one with --name, --config or --state-dir"
        raise InstanceError(message, ExitCode.REFUSED)
    raise InstanceError(f"several instances: {', '.join(known)}; choose one with --name", ExitCode.USAGE)


def instances(environ: Mapping[str, str]) -> list[str]:
    """The names of all instances of this system and this user that have a store or a socket."""
    found = set()
    for state_base, runtime_base in _bases(environ):
        for base, mark in ((state_base, places.STORE), (runtime_base, places.SOCKET)):
            found |= {entry.name for entry in _entries(base) if _there(entry / mark)}
    return sorted(found)


def _bases(environ: Mapping[str, str]) -> Iterator[tuple[Path | None, Path | None]]:
    """Folders of instances, this user's before the system's: (of state directories, of runtime directories)."""
    if os.geteuid() != 0:
        state = environ.get("XDG_STATE_HOME") or (environ["HOME"] + "/.local/state" if environ.get("HOME") else None)
        runtime = environ.get("XDG_RUNTIME_DIR")
        yield (
            Path(state) / places.PRODUCT if state else None,
            Path(runtime) / places.PRODUCT if runtime else None,
        )
    yield SYSTEM[0] / places.PRODUCT, SYSTEM[1] / places.PRODUCT


def _there(path: Path) -> bool:
    """Whether we can see it; a folder that we may not enter shows nothing."""
    try:
        return path.exists()
    except OSError:
        return False


def _entries(base: Path | None) -> list[Path]:
    try:
        return [] if base is None else [entry for entry in base.iterdir() if _NAME.fullmatch(entry.name)]
    except OSError:
        return []


def _of_name(name: str, environ: Mapping[str, str]) -> Instance:
    candidates = []
    for state_base, runtime_base in _bases(environ):
        if state_base is None and runtime_base is None:
            continue
        state = (state_base or Path()) / name
        candidates.append(Instance(name, state, runtime_base / name if runtime_base else state / "run"))
    for mark in ("socket", "store"):
        for candidate in candidates:
            if _there(getattr(candidate, mark)):
                return candidate
    return candidates[0]


def _of_state_dir(state_dir: Path, name: str | None, environ: Mapping[str, str]) -> Instance:
    told = _told(state_dir / places.STORE)
    name = name or told.get("name") or state_dir.absolute().name
    if told.get("runtime_dir"):
        return Instance(name, state_dir, Path(told["runtime_dir"]))
    derived = places.runtime_dir(name, environ)
    runtime = state_dir / "run" if derived is None else derived[0]
    if not _there(runtime / places.SOCKET) and _there(state_dir / "run" / places.SOCKET):
        runtime = state_dir / "run"
    return Instance(name, state_dir, runtime)


def _told(store: Path) -> dict[str, str]:
    """What the daemon wrote into the store about itself."""
    try:
        history = History.open(store)
        if history is None:
            return {}
        with closing(history):
            told = history.meta(places.INSTANCE_META)
    except (StoreError, sqlite3.Error, OSError):
        return {}
    return {key: value for key, value in told.items() if isinstance(value, str)} if isinstance(told, dict) else {}


def _of_config(config: Path, name: str | None, state_dir: Path | None, environ: Mapping[str, str]) -> Instance:
    given: dict[str, str] = {}
    for file in (config, *_drop_ins(config)):
        given.update(_keys(file))
    for key in _KEYS:
        variable = "SUPERVISE_" + key.upper().replace("-", "_")
        if environ.get(variable):
            given[key] = environ[variable]
    name = name or given.get("name") or config.stem
    if state_dir is None:
        try:
            state_dir = _located(given.get("state-dir"), config, environ) or places.state_dir(name, environ)[0]
        except ValueError as error:
            raise InstanceError(f"{config}: state-dir: {error}", ExitCode.CONFIGURATION) from error
    runtime = _located(given.get("runtime-dir"), config, environ)
    if runtime is None:
        derived = places.runtime_dir(name, environ)
        runtime = state_dir / "run" if derived is None else derived[0]
    return Instance(name, state_dir, runtime)


def _located(path: str | None, config: Path, environ: Mapping[str, str]) -> Path | None:
    if path is None:
        return None
    if path.startswith("~/") and environ.get("HOME"):
        return Path(environ["HOME"]) / path[2:]
    return config.parent.absolute() / path


def _drop_ins(config: Path) -> list[Path]:
    try:
        entries = sorted((config.parent / "conf.d").iterdir())
    except OSError:
        return []
    return [entry for entry in entries if entry.suffix == ".toml" and not entry.name.startswith(".")]


def _keys(file: Path) -> dict[str, str]:
    try:
        if not file.is_file():
            raise InstanceError(f"{file}: there is no such policy file", ExitCode.CONFIGURATION)
        with file.open("rb") as opened:
            content = opened.read(LARGEST_POLICY + 1)
        if len(content) > LARGEST_POLICY:
            raise InstanceError(f"{file}: larger than 1 MiB, this is no policy file", ExitCode.CONFIGURATION)
        table: dict[str, Any] = tomllib.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise InstanceError(f"{file}: cannot be read ({error.strerror})", ExitCode.CONFIGURATION) from error
    except (ValueError, RecursionError) as error:
        first_line = (str(error).splitlines() or ["unreadable"])[0][:200]
        fix = "correct it, or use --name or --state-dir"
        raise InstanceError(f"{file}: not valid TOML: {first_line}; {fix}", ExitCode.CONFIGURATION) from error
    return {key: table[key] for key in _KEYS if isinstance(table.get(key), str)}
