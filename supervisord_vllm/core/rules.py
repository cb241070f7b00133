"""Rules: how the next value of a lever is found. Each returns the moves and their arithmetic, or why it cannot help."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from supervisord_vllm.core.case import Case
from supervisord_vllm.core.decision import Move
from supervisord_vllm.core.ledger import BLOCK, MARGIN, PRINTED, Room, gib, per_mille_up, requested
from supervisord_vllm.core.levers import EAGER, MODEL_LEN, NUM_SEQS, UTILIZATION, WEIGHTS, LeverValue, Rung, show
from supervisord_vllm.core.observations import Observation
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.soaking import SIGNATURE

Found = tuple[tuple[Move, ...], str]
Rule = Callable[[Policy, Case, str, Rung], Found | str]

DEFAULT_STEP = 50
"""A blind step of the utilization (per mille) where the ladder names none."""


def _lower_utilization(case: Case, rung: Rung, amount: int, why: str, *, how_step: bool = False) -> Found | str:
    """Down by ``amount`` per mille; a blind step stops at the floor, a computed one must be allowed as it is."""
    now = case.value(UTILIZATION)
    if not isinstance(now, int):
        return "its present value is not known"
    floor = rung.min if rung.min is not None else 0
    if now <= floor:
        return f"already at its floor {show(UTILIZATION, floor)}"
    after = now - amount
    if after < floor:
        if not how_step:
            return f"{show(UTILIZATION, after)} would be needed, below its floor {show(UTILIZATION, floor)}"
        after = floor
    how = "stepped" if how_step else "computed"
    return (Move(UTILIZATION, now, after, "down", how),), why  # type: ignore[arg-type]  # how is one of the two


def _raise_utilization(policy: Policy, case: Case, rung: Rung, amount: int, why: str, *, step: bool) -> Found | str:
    now = case.value(UTILIZATION)
    if not isinstance(now, int):
        return "its present value is not known"
    declared = policy.declared.number(UTILIZATION)
    ceiling = rung.max if rung.max is not None else declared if declared is not None else 1000
    after = now + amount
    if after > ceiling:
        return f"{show(UTILIZATION, after)} would be needed, above its max {show(UTILIZATION, ceiling)}"
    if case.room and after > case.room.fits:
        return f"{show(UTILIZATION, after)} would be needed, but only {gib(case.room.free)} are free"
    return (Move(UTILIZATION, now, after, "up", "stepped" if step else "computed"),), why


def _ceiling(policy: Policy, case: Case, rung: Rung) -> int:
    """The highest utilization that is permitted and for which memory is free, per mille."""
    declared = policy.declared.number(UTILIZATION)
    most = rung.max if rung.max is not None else declared if declared is not None else 1000
    return min(most, case.room.fits) if case.room else most


def _fit(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    if case.room is None:
        return "free memory is not known"
    now = case.value(UTILIZATION)
    if not isinstance(now, int):
        return "its present value is not known"
    fits = case.room.fits
    if fits >= now:
        return f"{show(UTILIZATION, now)} fits"
    return _lower_utilization(case, rung, now - fits, fit_arithmetic(case.room))


def fit_arithmetic(tight: Room) -> str:
    """The computation of `Room.fits`, spelled out."""
    return (
        f"⌊({gib(tight.free)} free − {gib(MARGIN)}) / {gib(tight.total)}⌋ = {show(UTILIZATION, tight.fits)}"
        f" on {tight.name}"
    )


def _shortfall(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    needed, there, total = case.numbers.size("needed_kv_gib"), case.numbers.size("available_kv_gib"), case.total
    if needed is None or there is None or total is None:
        return "the shortfall was printed too coarsely to compute with"
    amount = max(1, per_mille_up(needed - there + PRINTED, total))
    why = f"({gib(needed)} needed − {gib(there)} there) / {gib(total)} = +{amount / 1000:.3f}"
    return _raise_utilization(policy, case, rung, amount, why, step=False)


def _deficit(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    there, total = case.numbers.size("available_kv_gib"), case.total
    if there is None or there > 0 or total is None:
        return _raise_utilization(
            policy, case, rung, rung.step or DEFAULT_STEP, "no deficit was printed: one step", step=True
        )
    length, token = case.value(MODEL_LEN), case.ledger.bytes_per_token
    if isinstance(length, int) and token:
        request, name = round(length * token), "one request"
    else:
        request, name = (rung.step or DEFAULT_STEP) * total // 1000, "one step, as the size of a request is not known"
    amount = per_mille_up(-there + request + PRINTED, total)
    why = f"({gib(-there)} deficit + {gib(request)} for {name}) / {gib(total)} = +{amount / 1000:.3f}"
    found = _raise_utilization(policy, case, rung, amount, why, step=False)
    now, most = case.value(UTILIZATION), _ceiling(policy, case, rung)
    if not isinstance(found, str) or not isinstance(now, int) or policy.rung(MODEL_LEN) is None:
        return found
    if most - now < per_mille_up(-there + MARGIN, total):
        return found
    why = f"as far as may be, above the deficit of {gib(-there)}: a shorter length can then use it"
    return _raise_utilization(policy, case, rung, most - now, why, step=False)


def _tried(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    tried, total = case.numbers.size("tried_gib"), case.total
    if tried is None or total is None:
        return _lower_utilization(case, rung, rung.step or DEFAULT_STEP, "no size was printed: one step", how_step=True)
    amount = max(1, per_mille_up(tried + MARGIN, total))
    why = f"({gib(tried)} tried + {gib(MARGIN)}) / {gib(total)} = −{amount / 1000:.3f}"
    return _lower_utilization(case, rung, amount, why)


def _missing_amount(case: Case) -> tuple[int, str] | None:
    tried, free, total = case.numbers.size("tried_gib"), case.numbers.size("free_gib"), case.total
    if tried is None or total is None:
        return None
    missing = tried - (free or 0) + MARGIN
    amount = max(1, per_mille_up(missing, total))
    word = "too much" if case.diagnosis.signature == SIGNATURE else "tried"
    why = f"({gib(tried)} {word} − {gib(free or 0)} free + {gib(MARGIN)}) / {gib(total)} = −{amount / 1000:.3f}"
    return amount, why


def _missing(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    found = _missing_amount(case)
    if found is None:
        return _lower_utilization(case, rung, rung.step or DEFAULT_STEP, "no size was printed: one step", how_step=True)
    return _lower_utilization(case, rung, *found)


def _missing_or_step(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    step = rung.step or DEFAULT_STEP
    found = _missing_amount(case)
    measured = case.diagnosis.signature == SIGNATURE  # nothing failed: what is missing is known
    if found is None or (found[0] <= step and not measured):
        why = f"one step of {step / 1000:.3f}" + (f", more than {found[1]}" if found else "")
        return _lower_utilization(case, rung, step, why, how_step=True)
    return _lower_utilization(case, rung, *found)


def _host(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    if not case.host_memory:
        return "it does not govern host memory on a GPU"
    return _lower_utilization(
        case, rung, rung.step or DEFAULT_STEP, "one step: on a CPU engine it is host memory", how_step=True
    )


def _estimate(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    now = case.value(MODEL_LEN)
    if not isinstance(now, int):
        return "its present value is not known"
    numbers = case.numbers
    limit = numbers.count("estimated_max_len") or numbers.count("kv_tokens")
    name = "vLLM's estimate"
    if limit is None:
        needed, there = numbers.size("needed_kv_gib"), numbers.size("available_kv_gib")
        if needed is None or there is None or there <= 0:
            return "no length that fits was printed"
        limit, name = now * there // needed, f"{now:,} × {gib(there)} / {gib(needed)}"
    after = int(limit / policy.min_concurrency) // BLOCK * BLOCK
    if rung.min is not None and after < rung.min and (wider := _wider(policy, case, rung.min, now)) is not None:
        return wider
    if after >= now or after <= 0:
        return f"{name} {limit:,} is no way down from {now:,}"
    if rung.min is not None and after < rung.min:
        return f"{after:,} would fit, below its floor {rung.min:,}"
    share = f" / {policy.min_concurrency:g} at once" if policy.min_concurrency != 1 else ""
    return (Move(MODEL_LEN, now, after, "down", "computed"),), f"{name} {limit:,}{share}, whole blocks: {after:,}"


def _wider(policy: Policy, case: Case, least: int, now: int) -> Found | None:
    """A length above its floor together with the highest utilization, where neither alone is enough."""
    permit, needed, there = (
        policy.rung(UTILIZATION),
        case.numbers.size("needed_kv_gib"),
        case.numbers.size("available_kv_gib"),
    )
    util, total = case.value(UTILIZATION), case.total
    if permit is None or needed is None or there is None or not isinstance(util, int) or total is None:
        return None
    most = _ceiling(policy, case, permit)
    pool = there + (most - util) * total // 1000 - PRINTED
    after = int(now * pool / needed / policy.min_concurrency) // BLOCK * BLOCK
    if most <= util or not least <= after < now:
        return None
    moves = (Move(UTILIZATION, util, most, "up", "computed"), Move(MODEL_LEN, now, after, "down", "computed"))
    return moves, f"{gib(pool)} at the highest permitted utilization, for {now:,} × {gib(pool)} / {gib(needed)} tokens"


def _clamp(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    now, limit = case.value(MODEL_LEN), case.numbers.count("derived_max_model_len")
    if limit is None or not isinstance(now, int) or now <= limit:
        return "vLLM printed no bound for it"
    if rung.min is not None and limit < rung.min:
        return f"the model's limit {limit:,} is below its floor {rung.min:,}"
    return (Move(MODEL_LEN, now, limit, "down", "computed"),), f"the model's own limit is {limit:,}"


def forbidden_by(move: Move, seen: Observation) -> str:
    """Why a move is not made: what was observed before."""
    if move.lever != UTILIZATION or not isinstance(move.after, int):
        what = "ran out of memory" if seen.outcome == "failed-high" else "had too little KV cache"
        return f"{show(move.lever, move.after)} is known to fail: what asks for no more {what} ({seen.kind.value})"
    if seen.outcome == "failed-low":
        return f"{show(UTILIZATION, move.after)} was already too small for the KV cache"
    return (
        f"{show(UTILIZATION, move.after)} is not below {show(UTILIZATION, seen.utilization)}, which ran out of memory"
    )


def _sliding(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    """A sliding-window layer keeps window + batched tokens of each request."""
    if not case.numbers.numbers.get("sliding_window"):
        return "it enters the need of one request only for models with a sliding window"
    return _step(policy, case, lever, rung)


def _weights_with_utilization(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    """Smaller weights alone would only enlarge the KV cache: utilization goes down with them, by what was missing."""
    found = _next(policy, case, lever, rung)
    permit = policy.rung(UTILIZATION)
    if isinstance(found, str) or permit is None:
        return found
    lower = _missing_or_step(policy, case, UTILIZATION, permit)
    if isinstance(lower, str):
        return found
    return (*found[0], *lower[0]), f"{found[1]}; utilization {lower[1]}, so that what they free stays free"


def _step(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    if lever == UTILIZATION:
        step = rung.step or DEFAULT_STEP
        return _lower_utilization(case, rung, step, f"one step of {step / 1000:.3f}", how_step=True)
    now = case.value(lever)
    if not isinstance(now, int) or isinstance(now, bool):
        return "its present value is not known"
    floor = rung.min if rung.min is not None else 1
    after = max(floor, now - rung.step if rung.step else int(now * (rung.factor or 0.5)))
    if after >= now:
        return f"already at its floor {floor:,}"
    why = f"{now:,} − {rung.step:,}" if rung.step else f"{now:,} × {rung.factor or 0.5:g}"
    return (Move(lever, now, after, "down", "stepped"),), why


def _activation(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    weights, total, now = case.numbers.size("weights_gib"), case.total, case.value(UTILIZATION)
    if weights and total and isinstance(now, int) and weights > requested(now, total):
        return f"the weights alone ({gib(weights)}) exceed the request"
    return _step(policy, case, lever, rung)


def _with_utilization(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    """Fewer batched tokens free activation memory; without less utilization the KV cache would take it."""
    if lever == WEIGHTS:
        return _weights_with_utilization(policy, case, lever, rung)
    found = _step(policy, case, lever, rung)
    if isinstance(found, str):
        return found
    (move,), why = found
    activation, total, now = case.numbers.size("activation_gib"), case.total, case.value(UTILIZATION)
    permit = policy.rung(UTILIZATION)
    if not (activation and total and isinstance(now, int) and permit):
        return found
    # Activation grows about linearly with the batched tokens; half of the saving is taken as certain.
    share = 1 - int(move.after) / int(move.before or 1)  # type: ignore[arg-type]  # _step moves integers only
    amount = int(1000 * activation * share / 2) // total
    floor = permit.min or 0
    if amount < 1 or now - amount < floor:
        return found
    both = (move, Move(UTILIZATION, now, now - amount, "down", "computed"))
    return both, f"{why}; utilization −{amount / 1000:.3f} so that the freed activation stays free"


def _slots(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    now, slots = case.value(NUM_SEQS), case.numbers.count("state_slots")
    if slots is None:
        return "vLLM printed no number of blocks"
    if rung.min is not None and slots < rung.min:
        return f"{slots:,} would fit, below its floor {rung.min:,}"
    return (Move(NUM_SEQS, now, slots, "down", "computed"),), f"vLLM has {slots:,} state blocks"


def _eager_on(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    if case.levers.eager:
        return "already on"
    return (Move(EAGER, case.levers.get(EAGER, False), True, "switch", "stepped"),), "no CUDA graphs are captured"


def _eager_counted(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    if not case.numbers.numbers.get("graphs_counted"):
        return "this vLLM does not count CUDA graphs in the budget, so it would give the KV cache nothing"
    return _eager_on(policy, case, lever, rung)


def _eager_uncounted(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    if case.numbers.numbers.get("graphs_counted"):
        return "CUDA graphs are counted in the budget, so the KV cache would take what it frees"
    return _eager_on(policy, case, lever, rung)


def _next(policy: Policy, case: Case, lever: str, rung: Rung) -> Found | str:
    now = case.levers.get(lever)
    after = next_of(rung, now)
    if after is None:
        return "the last alternative is in use" if rung.use else "no alternatives are declared"
    return (Move(lever, now, after, "switch", "stepped"),), "the next declared alternative"


def next_of(rung: Rung, now: LeverValue | None) -> LeverValue | None:
    """The alternative after the present one; the first where the present one is the declared value."""
    place = rung.use.index(now) + 1 if now in rung.use else 0
    return rung.use[place] if place < len(rung.use) else None


RULES: Mapping[str, Rule] = {
    "fit": _fit,
    "shortfall": _shortfall,
    "deficit": _deficit,
    "tried": _tried,
    "missing": _missing,
    "missing_or_step": _missing_or_step,
    "host": _host,
    "estimate": _estimate,
    "clamp": _clamp,
    "step": _step,
    "activation": _activation,
    "with_utilization": _with_utilization,
    "sliding": _sliding,
    "slots": _slots,
    "on": _eager_on,
    "counted": _eager_counted,
    "uncounted": _eager_uncounted,
    "next": _next,
}
