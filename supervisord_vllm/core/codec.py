"""Facts, decisions, diagnoses and policies as JSON values, and back.

`to_json` and `from_json` are inverses for every class in `CLASSES`. The form is the dataclass as an object of its
fields, with these exceptions: enums are their value, tuples are arrays, sets are sorted arrays, `Levers` and the values
of a `Move` take their public form (utilization as a fraction), and a `Move` says ``from`` and ``to``.

Reading is tolerant towards a newer minor version: unknown keys and unknown levers are ignored, missing keys take the
field's default. A value of the wrong type, an unknown enum value or a missing key without a default raises
``ValueError`` with the place. Non-finite floats pass through as they are.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints, overload

from supervisord_vllm.core.case import Case
from supervisord_vllm.core.creep import Growth
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Change, Diagnosis, Evidence
from supervisord_vllm.core.facts import FACTS, DeviceMemory, DeviceSoak, Fact, Hold, ProcessRef
from supervisord_vllm.core.ledger import Ledger, Room
from supervisord_vllm.core.levers import LEVERS, Levers, Rung, Weights, value_from_json, value_to_json
from supervisord_vllm.core.observations import Known, Observation
from supervisord_vllm.core.policy import Backoff, Gate, Override, Policy, Pressure, Proof
from supervisord_vllm.core.state import Draining, Ending, Incident, Launch, Opening, Plan, Probe, State
from supervisord_vllm.core.windows import Window

T = TypeVar("T")
Json: TypeAlias = Any
"""What `json.loads` gives: its shape is only known while it is read."""
Hint: TypeAlias = Any
"""A type as `typing.get_type_hints` gives it: a class or a special form."""

CLASSES: Mapping[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        *FACTS,
        Decision,
        Move,
        Diagnosis,
        Change,
        Evidence,
        DeviceMemory,
        ProcessRef,
        Levers,
        Weights,
        Policy,
        Rung,
        Override,
        Backoff,
        Gate,
        Pressure,
        Observation,
        Hold,
        Growth,
        Window,
        State,
        Launch,
        Incident,
        Opening,
        Plan,
        Draining,
        Ending,
        Probe,
        Case,
        Known,
        Ledger,
        Room,
        DeviceSoak,
        Proof,
    )
}


def to_json(obj: object) -> dict[str, Any]:
    """One object of a class in `CLASSES` as a JSON object."""
    if type(obj).__name__ not in CLASSES:
        raise ValueError(f"{type(obj).__name__} has no JSON form")
    return cast("dict[str, Any]", _encode(obj))


@overload
def from_json(cls: type[T], data: object) -> T: ...
@overload
def from_json(cls: str, data: object) -> object: ...
def from_json(cls: type[Any] | str, data: object) -> object:
    """The object that `to_json` wrote; ``cls`` is the class or its name.

    Raises:
        ValueError: for an unknown class, or a value that is none of the class, naming the place.
    """
    found = CLASSES.get(cls) if isinstance(cls, str) else cls
    if found is None or found.__name__ not in CLASSES:
        raise ValueError(f"{cls!r} has no JSON form")
    return _decode(found, data, found.__name__)


def fact_from_json(name: str, data: object) -> Fact:
    """A fact by its class name, as the store keeps it."""
    fact = from_json(name, data)
    if isinstance(fact, Fact):
        return fact
    raise ValueError(f"{name} is no fact")


def policy_to_json(policy: Policy) -> dict[str, Any]:
    """A policy in full, so that a run can be replayed later without its file."""
    return to_json(policy)


def policy_from_json(data: object) -> Policy:
    """The inverse of `policy_to_json`."""
    return from_json(Policy, data)


def _encode(value: object) -> Json:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Levers):
        return value.to_json()
    if isinstance(value, Move):
        return _encode_move(value)
    if isinstance(value, (set, frozenset)):
        return sorted(_encode(item) for item in value)
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(_encode(key)): _encode(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise ValueError(f"{type(value).__name__} has no JSON form")


def _encode_move(move: Move) -> dict[str, Any]:
    def shown(value: Json) -> Json:
        if value is None or move.lever not in LEVERS:
            return _encode(value)
        return value_to_json(move.lever, value)

    return {
        "lever": move.lever,
        "from": shown(move.before),
        "to": shown(move.after),
        "direction": move.direction,
        "how": move.how,
    }


def _decode_move(data: object, where: str) -> Move:
    shape = _object(data, where)
    lever = _decode(str, shape.get("lever"), f"{where}.lever")

    def value(key: str) -> Json:
        given = shape.get(key)
        if given is None or lever not in LEVERS:
            return given
        try:
            return value_from_json(lever, given)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{where}.{key}: {error}") from error

    if shape.get("to") is None:
        raise ValueError(f"{where}.to is missing")
    return Move(
        lever=lever,
        before=value("from"),
        after=value("to"),
        direction=_decode(_hints(Move)["direction"], shape.get("direction"), f"{where}.direction"),
        how=_decode(_hints(Move)["how"], shape.get("how"), f"{where}.how"),
    )


def _decode_levers(data: object, where: str) -> Levers:
    known = {name: value for name, value in _object(data, where).items() if name in LEVERS}
    try:
        return Levers.from_json(known)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{where}: {error}") from error


@cache
def _resolved(name: str) -> dict[str, Hint]:
    return get_type_hints(CLASSES[name])


def _hints(cls: type[Any]) -> dict[str, Hint]:
    return _resolved(cls.__name__)


def _object(data: object, where: str) -> Mapping[str, Any]:
    if isinstance(data, Mapping):
        return data
    raise ValueError(f"{where}: {_short(data)} is no object")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _decode(hint: Hint, data: Json, where: str) -> Json:
    origin: Hint = get_origin(hint)
    if origin is Union or origin is types.UnionType:
        return _decode_union(get_args(hint), data, where)
    if origin is Literal:
        if data in get_args(hint):
            return data
        raise ValueError(f"{where}: {_short(data)} is none of {', '.join(map(str, get_args(hint)))}")
    if origin in (tuple, frozenset):
        if not isinstance(data, (list, tuple)):
            raise ValueError(f"{where}: {_short(data)} is no array")
        of, *others = get_args(hint)
        if others and others != [Ellipsis]:  # a tuple of so many: each place has a type of its own
            if len(data) != 1 + len(others):
                raise ValueError(f"{where}: {_short(data)} has not {1 + len(others)} items")
            return tuple(
                _decode(*pair, f"{where}[{index}]") for index, pair in enumerate(zip((of, *others), data, strict=True))
            )
        items = (_decode(of, item, f"{where}[{index}]") for index, item in enumerate(data))
        return tuple(items) if origin is tuple else frozenset(items)
    if origin is not None and issubclass(origin, Mapping):
        of_key, of_value = get_args(hint)
        return {
            _decode(of_key, key, f"{where} key"): _decode(of_value, value, f"{where}.{key}")
            for key, value in _object(data, where).items()
        }
    return _decode_plain(hint, data, where)


def _decode_plain(hint: Hint, data: Json, where: str) -> Json:
    special = _SPECIAL.get(hint)
    if special is not None:
        return special(data, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(data)
        except ValueError as error:
            raise ValueError(f"{where}: {_short(data)} is no {hint.__name__}") from error
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _decode_dataclass(hint, data, where)
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if hint is type(None) and data is None:
        return None
    if hint in (bool, int, float, str) and type(data) is hint:
        return data
    raise ValueError(f"{where}: {_short(data)} is no {getattr(hint, '__name__', hint)}")


def _decode_union(members: tuple[Hint, ...], data: Json, where: str) -> Json:
    if type(data) in members:  # exact first: an int stays an int beside a float
        return data
    last: ValueError | None = None
    for member in members:
        if member is type(None):
            continue
        try:
            return _decode(member, data, where)
        except ValueError as error:
            last = error
    raise last or ValueError(f"{where}: {_short(data)} does not fit")


def _decode_dataclass(cls: type[Any], data: object, where: str) -> Json:
    shape = _object(data, where)
    hints = _hints(cls)
    given = {}
    for field in dataclasses.fields(cls):
        if field.name in shape:
            given[field.name] = _decode(hints[field.name], shape[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}.{field.name} is missing")
    return cls(**given)


_SPECIAL: Mapping[Any, Callable[[object, str], Any]] = {Levers: _decode_levers, Move: _decode_move}
