"""Feasibility: whether a model fits a card at all; if not, what is missing and what would fit.

Everything is computed from what vLLM printed for the failed launch: weights, activation, non-torch memory, graphs where
they are counted, and the KV cache of one request of the length that was asked for. For models whose KV cache is no
plain product (hybrid, sliding window, MLA) the printed need of one request is used, never a formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from supervisord_vllm.core.case import Case
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.ledger import MARGIN, gib, requested
from supervisord_vllm.core.levers import KV_DTYPE, MODEL_LEN, UTILIZATION
from supervisord_vllm.core.policy import Policy

MEMORY = frozenset(kind for kind in Kind if kind.value.startswith(("oom_", "kv_")) and kind is not Kind.OOM_ENV_LIMIT)
PARALLEL = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Need:
    """What a launch needs, in bytes, and what it may use of the card with the least room."""

    weights: int
    other: int
    request: int
    usable: int

    @property
    def shortfall(self) -> int:
        """Bytes that are missing; 0 or less where it fits."""
        return self.weights + self.other + self.request - self.usable


def need_of(policy: Policy, case: Case) -> Need | None:
    """The account of a failed launch at the most that the policy permits; ``None`` where vLLM printed too little."""
    numbers, total = case.numbers, case.total
    weights = numbers.size("weights_gib")
    if weights is None or total is None:
        return None
    now, kv = case.value(UTILIZATION), numbers.size("available_kv_gib")
    if kv is not None and isinstance(now, int):
        other = requested(now, total) - kv - weights
    else:
        parts = ("activation_gib", "non_torch_gib", *(("graphs_gib",) if numbers.numbers.get("graphs_counted") else ()))
        other = sum(numbers.size(name) or 0 for name in parts)
    length, token = case.value(MODEL_LEN), case.ledger.bytes_per_token
    request = numbers.size("needed_kv_gib") or (round(length * token) if isinstance(length, int) and token else 0)
    rung = policy.rung(UTILIZATION)
    declared = policy.declared.number(UTILIZATION)
    most = max(x for x in (rung.max if rung else None, declared, now if isinstance(now, int) else None, 1) if x)
    usable = requested(most, total)
    if case.room is not None:
        usable = min(usable, case.room.free - MARGIN)
    return Need(weights, max(0, other), request, usable)


def would_fit(case: Case, need: Need) -> tuple[str, ...]:
    """What would make it fit, the smallest change first; computed, never guessed."""
    found: list[str] = []
    missing = need.shortfall
    if need.request // 2 >= missing and str(case.levers.get(KV_DTYPE, "auto")) == "auto":
        found.append("an fp8 KV cache (--kv-cache-dtype fp8)")
    left = need.weights - missing
    if left > 0:
        found.append(f"weights of at most {gib(left)} instead of {gib(need.weights)} (a quantised checkpoint)")
    for ranks in PARALLEL:
        if (need.weights + need.request) // ranks + need.other <= need.usable:
            found.append(f"{ranks} such cards (--tensor-parallel-size {ranks})")
            break
    return tuple(found)


def whole_story(policy: Policy, case: Case) -> str:
    """How a stop begins: "This card cannot run this model" with the arithmetic where that is the case."""
    kind = case.diagnosis.kind
    if kind not in MEMORY:
        return "Nothing automatic is right."
    opening = "This card cannot run this model as the policy permits it."
    need = need_of(policy, case)
    if need is None or need.shortfall <= 0:
        return opening
    parts = [f"weights {gib(need.weights)}", f"activations and buffers {gib(need.other)}"]
    if need.request:
        parts.append(f"one request {gib(need.request)}")
    fits = would_fit(case, need)
    could = f" What would fit: {', or '.join(fits)}." if fits else " No single change would make it fit."
    account = f"{' + '.join(parts)} against {gib(need.usable)} that it may use"
    return f"{opening} It lacks {gib(need.shortfall)}: {account}.{could}"
