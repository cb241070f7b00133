"""A scenario in virtual time, read from TOML and checked strictly: card, neighbours, faults, operators and load.

``schema = 1``, ``title``, ``duration``; ``base`` a packaged card or file; ``[[fault]]`` as in `fault`, also those of
`virtual.EXTRA_FAULTS`; ``[[neighbour]]`` with ``at``, ``bytes`` and optionally ``for``, ``pid``, ``user``, ``command``;
``[[operator]]`` with ``at`` and ``verb``; ``[[load]]`` with ``at``, ``rate`` (requests a second), ``prompt`` and
``output`` (tokens). Every mistake is a `CardError` of one line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from supervisord_vllm.simulation.card import SCHEMA, Card, CardError, card_from
from supervisord_vllm.simulation.fault import Fault, FaultError, fault_from
from supervisord_vllm.simulation.quantity import read_duration, read_size
from supervisord_vllm.simulation.virtual import EXTRA_FAULTS, Neighbour, Neighbours

FOLDER = Path(__file__).parent / "scenarios"
VERBS = ("start", "stop", "hold", "resume", "restart", "drain", "reset")
_KEYS = ("title", "duration", "neighbour", "operator", "load")


@dataclass(frozen=True, slots=True)
class Operator:
    """A verb at a moment."""

    at_s: float
    verb: str


@dataclass(frozen=True, slots=True)
class Load:
    """From a moment on: so many requests a second, each with so many prompt and output tokens."""

    at_s: float
    rate: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Scenario:
    """Everything that a rehearsal needs but the policy."""

    name: str
    title: str
    card: Card
    duration_s: float = 3600.0
    neighbours: Neighbours = field(default_factory=Neighbours)
    faults: tuple[Fault, ...] = ()
    operators: tuple[Operator, ...] = ()
    loads: tuple[Load, ...] = ()

    def faults_of(self, launch: int) -> tuple[Fault, ...]:
        """The faults of one launch."""
        return tuple(fault for fault in self.faults if fault.applies(launch))


def packaged() -> tuple[str, ...]:
    """The names of the scenarios that come with the package, in order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def read_scenario(source: str) -> Scenario:
    """A packaged scenario by its name, or one from a file.

    Raises:
        CardError: there is no such scenario, or it is wrong.
    """
    if source in packaged():
        path = FOLDER / f"{source}.toml"
    else:
        path = Path(source)
        if not path.is_file():
            raise CardError(f"no scenario {source!r}; known are {', '.join(packaged())}, or give a TOML file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CardError(f"{path}: cannot be read ({error})") from None
    return parse_scenario(text, path.stem, str(path), path.parent)


def parse_scenario(text: str, name: str, place: str, folder: Path) -> Scenario:
    """A scenario from its text; raises `CardError`."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CardError(f"{place}: no TOML: {error}") from None
    if data.get("schema") != SCHEMA:
        raise CardError(f"{place}: schema = {SCHEMA} must be set (found {data.get('schema')!r})")
    own = {key: data.pop(key) for key in _KEYS if key in data}
    faults = _tables(data, "fault", place)
    data.pop("fault", None)
    data.setdefault("base", "h200")
    title = own.get("title", name)
    if not isinstance(title, str):
        raise CardError(f"{place}: title: a string is wanted")
    return Scenario(
        name,
        title,
        card_from(data, place, folder),
        _seconds(own.get("duration", "1h"), f"{place}: duration"),
        Neighbours(tuple(_neighbour(t, f"{place}: [[neighbour]] {n}") for n, t in _numbered(own, "neighbour", place))),
        tuple(_fault(t, f"{place}: [[fault]] {n}") for n, t in enumerate(faults, 1)),
        tuple(_operator(t, f"{place}: [[operator]] {n}") for n, t in _numbered(own, "operator", place)),
        tuple(_load(t, f"{place}: [[load]] {n}") for n, t in _numbered(own, "load", place)),
    )


def _tables(data: Mapping[str, Any], key: str, place: str) -> list[Any]:
    found = data.get(key, [])
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise CardError(f"{place}: write [[{key}]] with two brackets")
    return found


def _numbered(data: Mapping[str, Any], key: str, place: str) -> list[tuple[int, dict[str, Any]]]:
    return list(enumerate(_tables(data, key, place), 1))


def _fault(table: dict[str, Any], where: str) -> Fault:
    kind = str(table.get("kind"))
    try:
        if kind not in EXTRA_FAULTS:
            return fault_from(table, where)
        stages = EXTRA_FAULTS[kind]
        like = fault_from({**table, "kind": "die" if stages else "slow-start"}, where)
    except FaultError as error:
        raise CardError(str(error)) from None
    return replace(like, kind=kind)


def _known(table: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in keys:
            raise CardError(f"{where} unknown key {key!r}; known are {', '.join(keys)}")


def _seconds(value: object, where: str) -> float:
    found = read_duration(value) if isinstance(value, str) else None
    if found is None:
        raise CardError(f'{where}: a duration such as "90s" is wanted, found {value!r}')
    return found


def _size(value: object, where: str) -> int:
    found = read_size(value) if isinstance(value, str) else None
    if found is None:
        raise CardError(f'{where}: a size such as "40GiB" is wanted, found {value!r}')
    return found


def _neighbour(table: dict[str, Any], where: str) -> Neighbour:
    _known(table, ("at", "bytes", "for", "pid", "user", "command"), where)
    since = _seconds(table.get("at", "0s"), f"{where} at")
    length = _seconds(table["for"], f"{where} for") if "for" in table else None
    pid = table.get("pid", 2712)
    if not isinstance(pid, int) or isinstance(pid, bool) or pid < 1:
        raise CardError(f"{where} pid: a number from 1 is wanted, found {pid!r}")
    return Neighbour(
        since,
        _size(table.get("bytes"), f"{where} bytes"),
        None if length is None else since + length,
        pid,
        str(table.get("user", "ada")),
        str(table.get("command", "python")),
    )


def _operator(table: dict[str, Any], where: str) -> Operator:
    _known(table, ("at", "verb"), where)
    verb = table.get("verb")
    if verb not in VERBS:
        raise CardError(f"{where} verb {verb!r} is unknown; known are {', '.join(VERBS)}")
    return Operator(_seconds(table.get("at"), f"{where} at"), str(verb))


def _load(table: dict[str, Any], where: str) -> Load:
    _known(table, ("at", "rate", "prompt", "output"), where)
    rate, prompt, output = table.get("rate"), table.get("prompt", 512), table.get("output", 256)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or rate < 0:
        raise CardError(f"{where} rate: requests a second are wanted, found {rate!r}")
    for key, value in (("prompt", prompt), ("output", output)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CardError(f"{where} {key}: a number of tokens from 1 is wanted, found {value!r}")
    return Load(_seconds(table.get("at", "0s"), f"{where} at"), float(rate), prompt, output)
