"""The sources of a policy, merged in order: file, drop-ins, environment, flags. Every value keeps its place.

Drop-ins are ``conf.d/*.toml`` beside the file, in the order of their names. A table is merged key by key; any other
value, lists such as ``[[ladder]]`` included, replaces the earlier one. In the environment ``[engine] env-file`` is
``SUPERVISE_ENGINE__ENV_FILE``; a flag is ``--set engine.env-file=…``. Their text is read as TOML where the key wants a
number, a switch, a list or a table, and taken as it is where it wants a text.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from supervisord_vllm.config import schema
from supervisord_vllm.config.errors import ConfigError, did_you_mean
from supervisord_vllm.config.tomlfile import KeyPath, TomlFile, read, value_of

PREFIX = "SUPERVISE_"
NO_KEYS = frozenset({"SUPERVISE_LAUNCH", "SUPERVISE_ADOPT", "SUPERVISE_HANDOVER", "SUPERVISE_UPGRADE_TRIAL"})
"""Variables of ours that set nothing: an engine's marker, a unit's word, what one daemon tells the next."""
"""The one variable of ours that the engine sees; it says nothing about a policy."""


@dataclass
class Merged:
    """One tree of values with the place of each: ``FILE:LINE``, ``environment NAME`` or ``flag --set KEY``."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Where a value, or else the nearest table around it, is given."""
        for length in range(len(path), 0, -1):
            if (place := self.places.get(path[:length])) is not None:
                return place
        return f"{self.path}:1"

    def add(self, values: dict[str, Any], places: Mapping[KeyPath, str]) -> None:
        """Lay one source over what is there."""
        replaced: set[KeyPath] = set()
        _lay(self.values, values, (), replaced)
        if replaced:
            self.places = {
                path: place
                for path, place in self.places.items()
                if not any(path[:length] in replaced for length in range(1, len(path) + 1))
            }
        self.places = {**places, **self.places}


def _lay(target: dict[str, Any], values: Mapping[str, Any], at: KeyPath, replaced: set[KeyPath]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _lay(target[key], value, (*at, key), replaced)
        else:
            if key in target:
                replaced.add((*at, key))
            target[key] = value


def merge(path: Path, environ: Mapping[str, str], flags: Mapping[str, object]) -> Merged:
    """Read and merge all sources; a file that cannot be read, and a key that does not exist, raise `ConfigError`."""
    merged = Merged(path)
    files = [read(path), *(read(extra) for extra in _drop_ins(path))]
    for file in files:
        merged.add(file.values, _places(file))
    if not files[0].values:
        raise ConfigError(
            f"{path}:1: schema: the file is empty; begin it with `schema = 1` and `[engine]` with `model`"
        )
    problems: list[str] = []
    variables = {variable(key): key for key, _ in schema.every_key()}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in NO_KEYS:
            continue
        if name in variables:
            _set(merged, variables[name], environ[name], f"environment {name}")
        else:
            near = difflib.get_close_matches(name, variables, n=1, cutoff=0.6)
            fix = f"did you mean {near[0]}?" if near else "unset it"
            problems.append(f"environment {name}: no key of a policy is called so; {fix}")
    settable = {".".join(key): key for key, _ in schema.every_key()}
    for name, value in flags.items():
        if name in settable:
            _set(merged, settable[name], value, f"flag --set {name}")
        else:
            problems.append(f"flag --set {name}: unknown key; {_near(name, settable)}")
    if problems:
        raise ConfigError(*problems)
    return merged


def variable(key: tuple[str, ...]) -> str:
    """The environment variable that sets a key: ``SUPERVISE_ENGINE__ENV_FILE``."""
    return PREFIX + "__".join(part.upper().replace("-", "_") for part in key)


def _near(name: str, settable: Mapping[str, object]) -> str:
    last = name.rpartition(".")[2].replace("_", "-")
    same = [key for key in settable if key.rpartition(".")[2] == last]
    return f"did you mean {same[0]}?" if same else did_you_mean(name, settable)


def _drop_ins(path: Path) -> list[Path]:
    folder = path.parent / "conf.d"
    try:
        return sorted(entry for entry in folder.iterdir() if entry.suffix == ".toml" and not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror}); let this user read the drop-ins") from None


def _places(file: TomlFile) -> dict[KeyPath, str]:
    return {path: f"{file.path}:{line}" for path, line in file.lines.items()}


def _set(merged: Merged, key: tuple[str, ...], value: object, place: str) -> None:
    if isinstance(value, str):
        value = _typed(dict(schema.every_key())[key], value)
    tree: Any = value
    for part in reversed(key):
        tree = {part: tree}
    merged.add(tree, {key[:length]: place for length in range(1, len(key) + 1)})


def _typed(annotation: object, text: str) -> object:
    """The text of a variable or flag as the value that the key wants."""
    wanted = {getattr(kind, "__origin__", kind) for kind in (annotation, *get_args(annotation))}
    if wanted.isdisjoint({int, float, bool, list, dict, 1}):  # 1: the literal of `schema`
        return text
    try:
        return value_of(text)
    except (ValueError, RecursionError):
        return text
