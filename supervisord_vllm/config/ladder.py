"""The declared levers and the rungs of the ladder, from what the file says of them.

A rung must know how far it may go: numbers need ``min``; ``max`` is the declared value unless given, so that a lever
without a declared value needs ``max`` too. Blind steps: 0.05 for the utilization, half for other numbers, unless
given.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from supervisord_vllm.config import values
from supervisord_vllm.config.errors import given
from supervisord_vllm.config.schema import PolicyFile, RungTable
from supervisord_vllm.config.tomlfile import KeyPath
from supervisord_vllm.core.levers import LEVERS, WEIGHTS, Levers, LeverValue, Rung, Weights, show

DEFAULT_STEP = 50
"""Per mille."""

DEFAULT_FACTOR = 0.5

Report = Callable[[KeyPath, str], None]


def declared(file: PolicyFile) -> Levers:
    """What is asked for; the weights are always part of it."""
    asked: dict[str, LeverValue] = {
        name: value for name in type(file.levers).model_fields if (value := getattr(file.levers, name)) is not None
    }
    asked[WEIGHTS] = Weights(file.engine.model, file.engine.quantization)
    return Levers(asked)


def rungs(file: PolicyFile, levers: Levers, report: Report) -> tuple[Rung, ...]:
    """The ladder in the core's units; what is wrong is reported with its key, and that rung left out."""
    built: dict[str, Rung] = {}
    for index, table in enumerate(file.ladder):
        if table.lever in built:
            report(
                ("ladder", index, "lever"),
                f"{_key(table.lever)} has a rung already; one rung per lever, remove one of them",
            )
            continue
        problems: dict[str, str] = {}
        built[table.lever] = _rung(table, levers.get(table.lever), problems.setdefault)
        for key, text in problems.items():
            report(("ladder", index, key), text)
    return tuple(built.values())


def _rung(table: RungTable, asked: LeverValue | None, report: Callable[[str, str], object]) -> Rung:
    kind = LEVERS[table.lever].kind
    if kind in {"per_mille", "int"}:
        return _numeric(table, asked if isinstance(asked, int) else None, report)
    for key in ("step", "factor", "min", "max"):
        if getattr(table, key) is not None:
            report(key, f"{_key(table.lever)} is no number; remove {key}")
    if kind == "bool":
        if table.use is not None:
            report("use", f"{_key(table.lever)} is a switch and has no alternatives; remove use")
        return Rung(table.lever)
    return Rung(table.lever, use=_alternatives(table, asked, report))


def _alternatives(
    table: RungTable, asked: LeverValue | None, report: Callable[[str, str], object]
) -> tuple[Weights | str, ...]:
    example = '[{ model = "NAME", quantization = "METHOD" }]' if table.lever == WEIGHTS else '["fp8"]'
    if not table.use:
        report("use", f"missing; say what {_key(table.lever)} may become: use = {example}")
        return ()
    read: Callable[[object], Weights | str] = values.weights if table.lever == WEIGHTS else values.filled
    found: list[Weights | str] = []
    for item in table.use:
        try:
            choice = read(item)
        except ValueError as error:
            report("use", str(error))
            continue
        if choice == asked:
            report("use", f"{given(str(choice))} is what is declared already; name another one")
        elif choice in found:
            report("use", f"{given(str(choice))} stands in the list twice; remove one")
        found.append(choice)
    return tuple(found)


def _numeric(table: RungTable, asked: int | None, report: Callable[[str, str], object]) -> Rung:
    lever, key = table.lever, _key(table.lever)
    per_mille = LEVERS[lever].kind == "per_mille"

    def bound(name: str) -> int | None:
        value: float | None = getattr(table, name)
        if value is None:
            return None
        try:
            return values.utilization(value) if per_mille else _whole(value)
        except ValueError as error:
            report(name, str(error))
            return None

    if table.use is not None:
        report("use", f"{key} is a number and has no alternatives; remove use, give min and max")
    low, high, step, factor = bound("min"), bound("max"), bound("step"), table.factor
    if table.min is None:
        report("min", f"missing; say how far {key} may go down: min = {'0.70' if per_mille else 'a whole number'}")
    if table.max is None and asked is None:
        report("max", f"missing, and {key} is not declared; declare it under [levers] or give max")
    if factor is not None and not 0 < factor < 1:
        report("factor", f"got {given(factor)}; a factor lies between 0 and 1, like 0.5")
    if factor is not None and table.step is not None:
        report("factor", "stands beside step; give one of them")
    if low is not None and high is not None and low > high:
        report("min", f"{show(lever, low)} is above max ({show(lever, high)}); exchange them or correct one")
    elif asked is not None:
        if low is not None and asked < low:
            report(
                "min",
                f"{show(lever, low)} is above the declared value ({show(lever, asked)}); lower min or declare more",
            )
        if high is not None and asked > high:
            report(
                "max",
                f"{show(lever, high)} is below the declared value ({show(lever, asked)}); raise max or declare less",
            )
    if table.step is None and factor is None:
        step, factor = (DEFAULT_STEP, None) if per_mille else (None, DEFAULT_FACTOR)
    return Rung(lever, step=step, factor=factor, min=low, max=asked if high is None else high)


def _whole(value: float) -> int:
    if not isfinite(value) or value != int(value) or not 1 <= value <= 2**31 - 1:
        raise ValueError(f"got {given(value)}; a whole number of at least 1 is needed")
    return int(value)


def _key(lever: str) -> str:
    return lever.replace("_", "-")
