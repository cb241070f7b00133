"""A simulated card and its scenario, read from TOML (`schema = 1`) and checked strictly.

One schema serves the stand-in engine and the virtual-time rehearsal: ``[card]`` the device, ``[model.NAME]`` what can
be served on it, ``[timing]`` how long a start takes, ``[[fault]]`` what goes wrong and when. ``base = "h200"`` (a
packaged card, or a file beside this one) is read first; the file's own tables are laid over it, its faults are added.

Sizes are strings such as ``"139.8GiB"`` and become bytes; durations such as ``"90s"`` become seconds. Every mistake is
a `CardError` of one line that names the place and the fix.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from supervisord_vllm.simulation.fault import Fault, FaultError, fault_from
from supervisord_vllm.simulation.quantity import read_duration, read_size

SCHEMA = 1


class CardError(ValueError):
    """The card or scenario file is wrong; one line that names the place and the fix."""


@dataclass(frozen=True, slots=True)
class Device:
    """The card. ``total`` is NVML's, ``reserved`` the driver's own part (vLLM sees total - reserved); ``context`` is
    what a CUDA context of one engine takes."""

    name: str
    uuid: str
    total: int
    reserved: int
    context: int
    default_max_num_seqs: int
    default_max_num_batched_tokens: int
    capability: str

    @property
    def usable(self) -> int:
        """What vLLM prints as the device's total, in bytes."""
        return self.total - self.reserved


@dataclass(frozen=True, slots=True)
class Model:
    """One checkpoint: numbers of its config.json, and measured constants (bytes). See `ledger` for how they are
    used."""

    name: str
    architecture: str
    max_model_len: int
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    weights: int
    non_torch: int
    activation_fixed_eager: int
    activation_fixed_warm: int
    activation_fixed_cold: int
    logits_fixed: int
    graphs_fixed: int
    graphs_each: int
    sequence_state: int
    warm_up_fixed: int
    warm_up_each_sequence: int
    quantization: str | None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds on the real card; the stages of a start, of a stop, the 503 window and the time from EngineCore's last
    word in a start that fails to the exit (``failed_start``) are divided by ``speed``.
    ``token``, ``sequence`` (per sequence that gets a token) and ``prefill`` (per 1,000 tokens) are the times of a step
    and are not scaled."""

    speed: float
    imports: float
    spawn: float
    weights: float
    compile_cold: float
    compile_warm: float
    profile: float
    warm_up: float
    capture: float
    death_window: float
    failed_start: float
    stop: float
    token: float
    sequence: float
    prefill: float


@dataclass(frozen=True)
class Card:
    """A whole file: device, models by name, timing and faults."""

    device: Device
    models: Mapping[str, Model]
    timing: Timing
    faults: tuple[Fault, ...] = field(default=())


_SIZE, _TIME, _INT, _TEXT, _NUMBER = "size", "duration", "whole number", "string", "number"

_DEVICE_KEYS: Mapping[str, str] = {
    "name": _TEXT,
    "uuid": _TEXT,
    "total": _SIZE,
    "reserved": _SIZE,
    "context": _SIZE,
    "default-max-num-seqs": _INT,
    "default-max-num-batched-tokens": _INT,
    "capability": _TEXT,
}
_MODEL_KEYS: Mapping[str, str] = {
    "architecture": _TEXT,
    "max-model-len": _INT,
    "layers": _INT,
    "hidden-size": _INT,
    "intermediate-size": _INT,
    "heads": _INT,
    "kv-heads": _INT,
    "head-size": _INT,
    "vocab-size": _INT,
    "weights": _SIZE,
    "non-torch": _SIZE,
    "activation-fixed-eager": _SIZE,
    "activation-fixed-warm": _SIZE,
    "activation-fixed-cold": _SIZE,
    "logits-fixed": _SIZE,
    "graphs-fixed": _SIZE,
    "graphs-each": _SIZE,
    "sequence-state": _SIZE,
    "warm-up-fixed": _SIZE,
    "warm-up-each-sequence": _SIZE,
}
_MODEL_OPTIONAL: Mapping[str, str] = {"quantization": _TEXT}
_TIMING_KEYS: Mapping[str, str] = {
    "speed": _NUMBER,
    "imports": _TIME,
    "spawn": _TIME,
    "weights": _TIME,
    "compile-cold": _TIME,
    "compile-warm": _TIME,
    "profile": _TIME,
    "warm-up": _TIME,
    "capture": _TIME,
    "death-window": _TIME,
    "failed-start": _TIME,
    "stop": _TIME,
    "token": _TIME,
    "sequence": _TIME,
    "prefill": _TIME,
}
_TOP_KEYS = ("schema", "base", "card", "model", "timing", "fault")


def packaged_card(name: str) -> str | None:
    """The text of a card that comes with the package (``"h200"``), or ``None`` if there is none of that name."""
    if not re.fullmatch(r"[a-z0-9-]{1,40}", name):
        return None
    found = Path(__file__).parent / "cards" / f"{name}.toml"
    return found.read_text(encoding="utf-8") if found.is_file() else None


def read_card(source: str | Path) -> Card:
    """Read a card or scenario: a packaged name or the path of a file.

    Raises:
        CardError: the file cannot be read, is no TOML, or breaks the schema.
    """
    text, place, folder = _text_of(str(source), None)
    return parse_card(text, place, folder)


def card_text(source: str | Path) -> str:
    """The text behind `read_card`'s argument, for keeping it elsewhere. Raises `CardError` like `read_card`."""
    return _text_of(str(source), None)[0]


def parse_card(text: str, place: str = "card", folder: Path | None = None) -> Card:
    """Parse the text of a card; ``place`` names it in errors, ``folder`` is where ``base`` files are looked for.

    Raises:
        CardError: as for `read_card`.
    """
    return _built(_merged(text, place, folder, ()), place)


def card_from(data: dict[str, Any], place: str, folder: Path | None = None) -> Card:
    """The same from tables that were read already (``base`` among them); raises `CardError`."""
    return _built(_laid_over(dict(data), place, folder, ()), place)


def _built(data: dict[str, Any], place: str) -> Card:
    device = _table(data, "card", place)
    models = data.get("model")
    if not isinstance(models, dict) or not models:
        raise CardError(f'{place}: no [model.NAME] table; add one, or base = "h200"')
    built = _values(device, _DEVICE_KEYS, {}, f"{place}: [card]")
    timing = _values(_table(data, "timing", place), _TIMING_KEYS, {}, f"{place}: [timing]")
    if timing["speed"] <= 0:
        raise CardError(f"{place}: [timing] speed must be above 0")
    if built["reserved"] + built["context"] >= built["total"]:
        raise CardError(f"{place}: [card] reserved + context leave nothing of total")
    faults = data.get("fault", [])
    if not isinstance(faults, list):
        raise CardError(f"{place}: write [[fault]] with two brackets")
    try:
        parsed = tuple(fault_from(entry, f"{place}: [[fault]] {number}") for number, entry in enumerate(faults, 1))
    except FaultError as error:
        raise CardError(str(error)) from None
    return Card(
        device=Device(**built),
        models={name: _model(name, table, place) for name, table in models.items()},
        timing=Timing(**timing),
        faults=parsed,
    )


def _model(name: str, table: object, place: str) -> Model:
    where = f"{place}: [model.{name!r}]"
    if not isinstance(table, dict):
        raise CardError(f"{where} must be a table")
    values = _values(table, _MODEL_KEYS, _MODEL_OPTIONAL, where)
    for key in ("max_model_len", "layers", "hidden_size", "kv_heads", "head_size", "vocab_size", "weights"):
        if values[key] < 1:
            raise CardError(f"{where} {key.replace('_', '-')} must be at least 1")
    return Model(name=name, **{"quantization": None, **values})


def _text_of(source: str, folder: Path | None) -> tuple[str, str, Path]:
    packaged = packaged_card(source)
    if packaged is not None:
        return packaged, f"{source} (packaged)", folder or Path()
    path = Path(source) if folder is None else folder / source
    try:
        return path.read_text(encoding="utf-8"), str(path), path.parent
    except OSError as error:
        raise CardError(
            f"{path}: cannot be read ({error.strerror}); give a packaged name such as h200 or a file"
        ) from None
    except UnicodeDecodeError:
        raise CardError(f"{path}: is not UTF-8 text") from None


def _merged(text: str, place: str, folder: Path | None, seen: tuple[str, ...]) -> dict[str, Any]:
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CardError(f"{place}: no TOML: {error}") from None
    if data.get("schema") != SCHEMA:
        raise CardError(f"{place}: schema = {SCHEMA} must be set (found {data.get('schema')!r})")
    return _laid_over(data, place, folder, seen)


def _laid_over(data: dict[str, Any], place: str, folder: Path | None, seen: tuple[str, ...]) -> dict[str, Any]:
    for key in data:
        if key not in _TOP_KEYS:
            raise CardError(f"{place}: unknown key {key!r}; known are {', '.join(_TOP_KEYS)}")
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str) or base in seen or len(seen) >= 8:
        raise CardError(f"{place}: base must name another card, and not in a circle (found {base!r})")
    under_text, under_place, under_folder = _text_of(base, folder)
    under = _merged(under_text, under_place, under_folder, (*seen, base))
    for key in ("card", "timing", "model"):
        above = data.get(key, {})
        if not isinstance(above, dict):
            raise CardError(f"{place}: [{key}] must be a table")
        below = under.get(key, {})
        if key == "model":
            above = {n: {**below.get(n, {}), **t} if isinstance(t, dict) else t for n, t in above.items()}
        data[key] = {**below, **above}
    data["fault"] = [*under.get("fault", []), *data.get("fault", [])]
    return data


def _table(data: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    table = data.get(key)
    if not isinstance(table, dict):
        raise CardError(f'{place}: no [{key}] table; add one, or base = "h200"')
    return table


def _values(
    table: Mapping[str, Any], keys: Mapping[str, str], optional: Mapping[str, str], where: str
) -> dict[str, Any]:
    for key in table:
        if key not in keys and key not in optional:
            raise CardError(f"{where} unknown key {key!r}; known are {', '.join((*keys, *optional))}")
    missing = [key for key in keys if key not in table]
    if missing:
        raise CardError(f"{where} lacks {', '.join(missing)}")
    return {key.replace("-", "_"): _value(table[key], {**keys, **optional}[key], f"{where} {key}") for key in table}


def _value(value: object, kind: str, where: str) -> object:
    good: object = None
    if (kind == _TEXT and isinstance(value, str)) or (
        kind == _INT and isinstance(value, int) and not isinstance(value, bool) and value >= 0
    ):
        good = value
    elif kind == _NUMBER and isinstance(value, (int, float)) and not isinstance(value, bool):
        good = float(value)
    elif kind == _SIZE and isinstance(value, str):
        good = read_size(value)
    elif kind == _TIME and isinstance(value, str):
        good = read_duration(value)
    if good is None:
        example = {_SIZE: ' such as "40GiB"', _TIME: ' such as "90s"'}.get(kind, "")
        raise CardError(f"{where}: a {kind}{example} is wanted, found {value!r}")
    return good
