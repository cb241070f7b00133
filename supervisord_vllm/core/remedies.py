"""What cures a kind: the table of remedies, and the choice of the first one that is permitted and can work.

The kind fixes which levers can help, in which direction and in what order; the ladder of the policy only permits and
bounds them. A remedy that cannot be used is passed over and the reason is kept, so that a decision can be explained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from supervisord_vllm.core import rules
from supervisord_vllm.core.case import Case
from supervisord_vllm.core.decision import Move
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.ledger import Ledger
from supervisord_vllm.core.levers import (
    BATCHED_TOKENS,
    EAGER,
    KV_DTYPE,
    LEVERS,
    MM_LIMITS,
    MODEL_LEN,
    NUM_SEQS,
    UTILIZATION,
    WEIGHTS,
    Levers,
    Rung,
    couple,
)
from supervisord_vllm.core.policy import Policy

CONTAINED_XIDS = frozenset({63, 94})
"""A memory row was remapped, an error was contained: the same configuration may be tried once more."""
WAIT, SAME_AGAIN, REAP, CLEAN, STOP = "wait", "same-again", "reap", "clean", "stop"
VERBS = (WAIT, SAME_AGAIN, REAP, CLEAN, STOP)
EXPANDABLE = "env:PYTORCH_ALLOC_CONF"
"""PyTorch's expandable segments: a remedy only where ``[allow] expandable-segments`` says so."""
EXPANDABLE_VARIABLES = (("PYTORCH_ALLOC_CONF", "expandable_segments:True"),)
NO_COMPILE_CACHE = (("VLLM_DISABLE_COMPILE_CACHE", "1"),)
OFFLINE = (("HF_HUB_OFFLINE", "1"),)
KEPT_VARIABLES = frozenset(name for name, _ in EXPANDABLE_VARIABLES)
"""Variables of a remedy that later launches keep; the others are for one launch."""
HUB_PATIENCE = 2
"""After so many failures of the hub a model that was served before is taken from its cache, offline."""
RETRY_LATER = 802
"""CUDA's "system not yet initialised" (the fabric manager still starts): the one broken environment that mends."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A lever with the rule that computes its next value, or a verb (then ``rule`` is empty)."""

    name: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """How one kind is treated.

    ``again`` is how often the same signature may be met with the same configuration before it stops (no proof in
    between). ``external`` kinds say nothing about the configuration: they teach no bracket. ``give_up`` is the action
    when nothing else is left.
    """

    remedies: tuple[Remedy, ...]
    again: int = 2
    external: bool = False
    give_up: Action = Action.STOP_EXPLAIN
    restart: Action = Action.RESTART_SAME


def _row(*remedies: str, **options: object) -> Row:
    parts = tuple(Remedy(*text.split(":")) for text in remedies)
    return Row(parts, **options)  # type: ignore[arg-type]  # the options are Row's own fields


_TREE = Action.KILL_TREE_RESTART
_U, _L, _S, _B = UTILIZATION, MODEL_LEN, NUM_SEQS, BATCHED_TOKENS

TABLE: Mapping[Kind, Row] = {
    Kind.GPU_BUSY_ORPHAN: _row(REAP, WAIT, external=True),
    Kind.GPU_BUSY_FOREIGN: _row(WAIT, f"{_U}:fit", STOP, external=True),
    Kind.GPU_BUSY_UMA: _row(CLEAN, WAIT, STOP, external=True),
    Kind.GPU_PROFILING_RACE: _row(SAME_AGAIN, STOP, external=True),
    Kind.KV_LEN_TOO_LONG: _row(
        f"{_U}:shortfall", f"{_L}:estimate", f"{KV_DTYPE}:next", f"{_B}:sliding", f"{WEIGHTS}:next", STOP
    ),
    Kind.KV_NO_BLOCKS: _row(
        f"{_U}:deficit", f"{_B}:activation", f"{_S}:activation", f"{EAGER}:counted", f"{WEIGHTS}:next", STOP
    ),
    Kind.KV_STATE_SLOTS: _row(f"{_S}:slots", STOP),
    Kind.OOM_WEIGHTS: _row(f"{WEIGHTS}:next", STOP),
    Kind.OOM_PROFILE: _row(f"{_B}:step", f"{_S}:step", f"{MM_LIMITS}:next", f"{WEIGHTS}:next", STOP),
    Kind.OOM_SAMPLER_WARMUP: _row(f"{_S}:step", f"{_U}:step", STOP),
    Kind.OOM_CUDAGRAPH: _row(f"{_U}:tried", "max_cudagraph_capture_size:step", f"{_S}:step", f"{EAGER}:on", STOP),
    Kind.OOM_KV_ALLOC: _row(f"{_U}:missing", STOP),
    Kind.OOM_RUNTIME: _row(
        f"{_U}:missing_or_step",
        f"{_B}:with_utilization",
        f"{_S}:step",
        f"{EAGER}:uncounted",
        f"{WEIGHTS}:with_utilization",
        STOP,
    ),
    Kind.OOM_MM: _row(
        f"{_U}:missing_or_step",
        f"{_B}:with_utilization",
        f"{MM_LIMITS}:next",
        f"{WEIGHTS}:with_utilization",
        STOP,
    ),
    Kind.OOM_LORA: _row("max_loras:step", "max_lora_rank:step", f"{_S}:step", f"{_U}:missing_or_step", STOP),
    Kind.OOM_FRAGMENTATION: _row(EXPANDABLE, STOP),
    Kind.OOM_ENV_LIMIT: _row(EXPANDABLE, STOP),
    Kind.VRAM_CREEP: _row(EXPANDABLE, SAME_AGAIN, STOP),
    Kind.HOST_OOM: _row(f"{_U}:host", STOP),
    Kind.SHM_EXHAUSTED: _row(STOP),
    Kind.OS_LIMIT: _row(STOP),
    Kind.ENGINE_DEAD: _row(SAME_AGAIN, STOP),
    Kind.WORKER_DIED: _row(SAME_AGAIN, STOP, restart=_TREE),
    Kind.CUDA_FAULT: _row(SAME_AGAIN, STOP),
    Kind.ENGINE_BUG: _row(SAME_AGAIN, STOP),
    Kind.POISON_REQUEST: _row(SAME_AGAIN, STOP),
    Kind.ENGINE_HUNG: _row(SAME_AGAIN, STOP, restart=_TREE),
    Kind.NCCL_HANG: _row(SAME_AGAIN, STOP, restart=_TREE),
    Kind.STARTUP_WEDGED: _row(SAME_AGAIN, STOP, restart=_TREE),
    Kind.GPU_HW_FAULT: _row(SAME_AGAIN, STOP, again=1, give_up=Action.STOP_OPERATOR),
    Kind.PORT_IN_USE: _row(WAIT, STOP, external=True),
    Kind.COMPILE_CACHE_CORRUPT: _row(SAME_AGAIN, STOP, again=1),
    Kind.HUB_TRANSIENT: _row(SAME_AGAIN, STOP, again=6, external=True),
    Kind.BAD_CONFIG: _row(f"{_L}:clamp", STOP),
    Kind.HUB_DENIED: _row(STOP),
    Kind.WEIGHTS_CORRUPT: _row(STOP),
    Kind.ENV_BROKEN: _row(SAME_AGAIN, STOP, again=6, give_up=Action.STOP_OPERATOR),
    Kind.STOP_HANG: _row(STOP, give_up=Action.STOP_OPERATOR),
    Kind.NVML_UNSUPPORTED: _row(SAME_AGAIN, STOP, external=True),
    Kind.OVERLOAD: _row(SAME_AGAIN, STOP),
    Kind.PERF_REGRESSION: _row(SAME_AGAIN, STOP),
    Kind.SLOW_STARTUP: _row(SAME_AGAIN, STOP),
    Kind.FALSE_ALARM: _row(SAME_AGAIN, STOP),
    Kind.NONE: _row(SAME_AGAIN, STOP),
    Kind.UNKNOWN: _row(SAME_AGAIN, STOP, again=1),
}

FAILED_LOW = frozenset({Kind.KV_NO_BLOCKS, Kind.KV_LEN_TOO_LONG, Kind.KV_STATE_SLOTS})
"""Kinds that say: too little was left for the KV cache, at this utilization and this demand."""
FAILED_HIGH = frozenset(
    {
        Kind.OOM_WEIGHTS,
        Kind.OOM_PROFILE,
        Kind.OOM_SAMPLER_WARMUP,
        Kind.OOM_CUDAGRAPH,
        Kind.OOM_KV_ALLOC,
        Kind.OOM_RUNTIME,
        Kind.OOM_MM,
        Kind.OOM_LORA,
    }
)
"""Kinds that say: this vector demands more than there is."""
_ORDERED_BY_STAGE = frozenset({Kind.OOM_RUNTIME, Kind.OOM_MM})


@dataclass(frozen=True, slots=True)
class Choice:
    """The remedy that was chosen; ``skipped`` says why each earlier one was not."""

    action: Action
    moves: tuple[Move, ...] = ()
    arithmetic: str = ""
    skipped: tuple[str, ...] = ()
    target: str | None = None
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def stops(self) -> bool:
        """Whether nothing automatic is right."""
        return self.action in (Action.STOP_EXPLAIN, Action.STOP_OPERATOR)


_PLAIN: Mapping[str, str] = {WEIGHTS: "next", KV_DTYPE: "next", MM_LIMITS: "next", EAGER: "on"}
"""The rule of a lever that a policy names for a kind whose own list does not have it; all others step down."""


def remedies_for(kind: Kind, policy: Policy) -> list[str]:
    """The remedies of a kind under this policy, in order, by name."""
    return [remedy.name for remedy in _ordered(kind, policy)]


def _ordered(kind: Kind, policy: Policy) -> tuple[Remedy, ...]:
    own = TABLE[kind].remedies
    override = policy.overrides.get(kind)
    if override is None:
        return own
    if override.remedies is not None:
        own_rules = {remedy.name: remedy.rule for remedy in own}
        return tuple(
            Remedy(name, "" if name in VERBS else own_rules.get(name, _PLAIN.get(name, "step")))
            for name in override.remedies
        )
    if override.order == "ladder":
        rank = {rung.lever: place for place, rung in enumerate(policy.ladder)}
        levers = sorted((r for r in own if r.name in rank), key=lambda r: rank[r.name])
        first = next((i for i, r in enumerate(own) if r.name in rank), 0)
        rest = [r for r in own if r.name not in rank]
        return (*[r for r in rest if own.index(r) < first], *levers, *[r for r in rest if own.index(r) > first])
    return own


def choose(policy: Policy, case: Case) -> Choice:
    """The first remedy of the kind that is permitted, bounded and able to help; stopping is always permitted.

    An out-of-memory failure while a neighbour grew is treated as its neighbour's: the configuration is not to blame.
    """
    kind = case.diagnosis.kind
    if case.races:
        kind = Kind.GPU_PROFILING_RACE
    blamed = Kind.GPU_BUSY_FOREIGN if case.grown and kind in (FAILED_HIGH | {Kind.KV_NO_BLOCKS}) else kind
    row = TABLE[blamed]
    skipped: list[str] = []
    if case.warms and policy.overrides.get(kind) is None:
        return Choice(row.restart, arithmetic="the first compile charged its own peak; the next start is warm")
    for remedy in _by_stage(case, _ordered(blamed, policy)):
        if remedy.name == STOP:
            break
        if remedy.rule == "clamp" and case.numbers.count("derived_max_model_len") is None:
            continue  # vLLM printed no bound: the mistake lies elsewhere, and to name this lever would mislead
        if refused := _refused(policy, case, blamed, remedy):
            skipped.append(f"{remedy.name}: {refused}")
            continue
        if remedy.name == WAIT:
            waits = Action.WAIT_PORT if blamed is Kind.PORT_IN_USE else Action.WAIT_VRAM
            return Choice(waits, skipped=tuple(skipped))
        if remedy.name == REAP:
            return Choice(Action.REAP, skipped=tuple(skipped))
        if remedy.name == EXPANDABLE:
            return Choice(Action.RESTART_SAME, skipped=tuple(skipped), environment=EXPANDABLE_VARIABLES)
        if remedy.name == CLEAN and blamed is Kind.GPU_BUSY_UMA:
            return Choice(Action.CLEAN, skipped=tuple(skipped), target="drop_page_cache")
        if remedy.name in (SAME_AGAIN, CLEAN):
            if case.repeated <= row.again:
                return Choice(row.restart, skipped=tuple(skipped), environment=_variables(case))
            skipped.append(f"same-again: this failure came {case.repeated} times without a proof in between")
            continue
        found = _move(policy, case, remedy)
        if isinstance(found, str):
            skipped.append(f"{remedy.name}: {found}")
            continue
        moves, arithmetic = found
        return Choice(Action.NEXT_CONFIG, moves, arithmetic, tuple(skipped))
    return Choice(row.give_up, skipped=tuple(skipped))


def _refused(policy: Policy, case: Case, kind: Kind, remedy: Remedy) -> str:
    """Why a remedy that is no lever is out of the question here; empty where it is not."""
    if kind is Kind.GPU_HW_FAULT and case.numbers.count("xid") not in CONTAINED_XIDS:
        return "a card that reports such a fault needs a person"
    if kind is Kind.ENV_BROKEN and remedy.name == SAME_AGAIN and case.numbers.count("cuda_error") != RETRY_LATER:
        return "a broken installation does not mend itself"
    if kind is Kind.GPU_BUSY_UMA and remedy.name == CLEAN:
        if "drop-caches" not in policy.allow:
            return "drop-caches is not allowed"
        return "" if case.repeated == 1 else "the caches were dropped already"
    if kind is Kind.GPU_BUSY_UMA and remedy.name == WAIT and case.repeated > TABLE[kind].again:
        return "it was waited for already, and each start leaks on unified memory"
    if remedy.name == EXPANDABLE:
        if "expandable-segments" not in policy.allow:
            return "expandable-segments is not allowed"
        if dict(EXPANDABLE_VARIABLES).items() <= dict(case.environment).items():
            return "expandable segments are in use already"
    return ""


def _variables(case: Case) -> tuple[tuple[str, str], ...]:
    """What the same configuration gets beside: no compile cache after a corrupt one, the cached model offline."""
    kind = case.diagnosis.kind
    if kind is Kind.COMPILE_CACHE_CORRUPT:
        return NO_COMPILE_CACHE
    if kind is Kind.HUB_TRANSIENT and case.repeated > HUB_PATIENCE and case.served_before:
        return OFFLINE
    return ()


def _by_stage(case: Case, remedies: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    """Out of memory in the sampler: the number of sequences frees what the batched tokens do not."""
    if case.diagnosis.kind not in _ORDERED_BY_STAGE or case.numbers.numbers.get("stage") != "sampler":
        return remedies
    names = [remedy.name for remedy in remedies]
    if BATCHED_TOKENS not in names or NUM_SEQS not in names:
        return remedies
    first, second = names.index(BATCHED_TOKENS), names.index(NUM_SEQS)
    if first > second:
        return remedies
    swapped = list(remedies)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    return tuple(swapped)


def apply(levers: Levers, moves: tuple[Move, ...]) -> Levers:
    """The vector after the moves, with its couplings kept."""
    return couple(levers.with_(**{move.lever: move.after for move in moves}))


def pinned(levers: Levers, seen: Ledger) -> Levers:
    """The vector with vLLM's own choice for undeclared levers made explicit, as far as the log printed it.

    vLLM's defaults differ by card and release and some depend on one another, so a later launch of the same incident
    would else change more than was decided.
    """
    for lever in (MODEL_LEN, BATCHED_TOKENS, NUM_SEQS):
        value = seen.count(lever)
        if lever not in levers and value is not None:
            levers = levers.with_(**{lever: value})
    return levers


def _move(policy: Policy, case: Case, remedy: Remedy) -> rules.Found | str:
    rung = policy.rung(remedy.name)
    if rung is None:
        return "not declared movable"
    if remedy.name in case.barred:
        return "vLLM refused the value, or the step changed nothing"
    return _not_forbidden(policy, case, rung, rules.RULES[remedy.rule](policy, case, remedy.name, rung))


TRIES = 24
"""Steps that are passed over at most because an observation forbids them."""


def _not_forbidden(policy: Policy, case: Case, rung: Rung, found: rules.Found | str) -> rules.Found | str:
    """What the rule found, or a further step the same way, or why every such step is known to fail."""
    start, lever, passed = case.levers, rung.lever, ""
    for _ in range(TRIES):
        if isinstance(found, str):
            return f"{passed}; {found}" if passed else found
        moves, why = found
        seen = case.known.against(pinned(apply(case.levers, moves), case.ledger))
        if seen is None:
            if not passed:
                return found
            return tuple(replace(move, before=start.get(move.lever, move.before)) for move in moves), f"{passed}: {why}"
        passed = rules.forbidden_by(moves[0], seen)
        useless = moves[0].direction == "up" or (lever == UTILIZATION and seen.outcome == "failed-low")
        if useless:
            return passed
        case = replace(case, levers=apply(case.levers, moves))
        rule = "next" if rung.use else "step"
        found = rules.RULES[rule](policy, case, lever, rung) if LEVERS[lever].kind != "bool" else passed
    return passed
