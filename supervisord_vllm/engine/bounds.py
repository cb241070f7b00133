"""Values that a printed message implies for a lever: the ``to`` of a change, as a fraction or a whole number.

A bound is ``None`` wherever a number it needs was not printed. Nothing is computed from a printed 0.0: with two
decimals it says no more than "less than 0.005 GiB". The arithmetic is `supervisord_vllm.core.ledger`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from supervisord_vllm.core.diagnosis import Number
from supervisord_vllm.core.ledger import MARGIN, PRINTED, fitting, per_mille_up, to_bytes

Numbers = Mapping[str, Number]


def bound(name: str, numbers: Numbers) -> Number | None:
    """The value of a formula of this module, or of a printed number, by name."""
    formula = FORMULAS.get(name)
    return formula(numbers) if formula is not None else numbers.get(name)


def _bytes(numbers: Numbers, name: str) -> int | None:
    value = numbers.get(name)
    return to_bytes(value) if isinstance(value, (int, float)) and value != 0 else None


def _utilization(numbers: Numbers) -> int | None:
    value = numbers.get("util")
    return round(1000 * value) if isinstance(value, (int, float)) and 0 < value <= 1 else None


def _within(per_mille: int) -> float | None:
    return per_mille / 1000 if 0 < per_mille <= 1000 else None


def fit_free(numbers: Numbers) -> float | None:
    """The largest utilization whose request fits into the free memory with vLLM's own margin of 150 MiB."""
    free, total = _bytes(numbers, "free_gib"), _bytes(numbers, "total_gib")
    return None if free is None or not total else _within(fitting(free, total))


def raise_by_deficit(numbers: Numbers) -> float | None:
    """The utilization at which a negative KV cache would be empty: what is needed is more than this."""
    available, total, utilization = (
        _bytes(numbers, "available_kv_gib"),
        _bytes(numbers, "total_gib"),
        _utilization(numbers),
    )
    if available is None or available > 0 or not total or utilization is None:
        return None
    return _within(utilization + per_mille_up(PRINTED - available, total))


def raise_by_shortfall(numbers: Numbers) -> float | None:
    """The utilization at which one request of the declared length fits."""
    needed, available = _bytes(numbers, "needed_kv_gib"), _bytes(numbers, "available_kv_gib")
    total, utilization = _bytes(numbers, "total_gib"), _utilization(numbers)
    if needed is None or available is None or not total or utilization is None:
        return None
    return _within(utilization + per_mille_up(needed - available + PRINTED, total))


def lower_by_tried(numbers: Numbers) -> float | None:
    """The utilization that leaves room outside the KV cache for the allocation that failed, plus 150 MiB."""
    tried, free = _bytes(numbers, "tried_gib"), numbers.get("free_gib")
    total, utilization = _bytes(numbers, "total_gib"), _utilization(numbers)
    if tried is None or not isinstance(free, (int, float)) or not total or utilization is None:
        return None
    return _within(utilization - per_mille_up(max(0, tried - to_bytes(free)) + MARGIN, total))


FORMULAS: Mapping[str, Callable[[Numbers], Number | None]] = {
    "fit_free": fit_free,
    "raise_by_deficit": raise_by_deficit,
    "raise_by_shortfall": raise_by_shortfall,
    "lower_by_tried": lower_by_tried,
}
