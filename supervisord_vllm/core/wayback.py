"""The way back, told: why a launch runs below what is declared, lever by lever, and when that will be taken back."""

from __future__ import annotations

from dataclasses import dataclass

from supervisord_vllm.core import telling
from supervisord_vllm.core.knowledge import known
from supervisord_vllm.core.levers import EAGER, LEVERS, UTILIZATION, LeverValue, show
from supervisord_vllm.core.observations import LIFETIME_S
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.remedies import pinned
from supervisord_vllm.core.state import Launch, State, StateName, climb_occasion, degraded


@dataclass(frozen=True, slots=True)
class Below:
    """One lever that runs below what is declared: why, and whether it comes back by itself."""

    lever: str
    now: LeverValue
    declared: LeverValue
    why: str
    climbs: bool


@dataclass(frozen=True, slots=True)
class WayBack:
    """All of them, and the next step up: what it waits for, and since or until when (CLOCK_BOOTTIME ns; ``None`` where
    that is not a matter of time)."""

    levers: tuple[Below, ...]
    waits_for: str
    at_ns: int | None


def way_back(policy: Policy, state: State, now_ns: int) -> WayBack | None:
    """Of the present launch; ``None`` where nothing of it is below what is declared."""
    launch = state.launch
    if launch is None or state.name not in (
        StateName.STARTING,
        StateName.PROVING,
        StateName.SERVING,
        StateName.DRAINING,
    ):
        return None
    climbing = degraded(policy, launch)
    levers = tuple(
        Below(name, now, wanted, _why(policy, state, launch, name, now_ns, climbing), name in climbing)
        for name, now, wanted in _below(policy, launch)
    )
    if not levers:
        return None
    waits, at_ns = _next(policy, state, launch, now_ns, climbing)
    return WayBack(levers, waits, at_ns)


def _below(policy: Policy, launch: Launch) -> list[tuple[str, LeverValue, LeverValue]]:
    found = []
    for name, wanted in policy.declared.items():
        now = launch.levers.get(name)
        if now is None or now == wanted:
            continue
        numeric = LEVERS[name].kind in ("int", "per_mille")
        if not numeric or launch.levers.number(name) < policy.declared.number(name):  # type: ignore[operator]  # numbers
            found.append((name, now, wanted))
    if launch.levers.eager and EAGER not in policy.declared:
        found.append((EAGER, True, False))
    return found


def _why(policy: Policy, state: State, launch: Launch, name: str, now_ns: int, climbing: tuple[str, ...]) -> str:
    wanted = launch.target.number(UTILIZATION)
    if name == UTILIZATION and wanted is not None and (launch.levers.number(UTILIZATION) or 0) < wanted:
        asked = show(UTILIZATION, wanted)
        if launch.room is None:
            return f"a neighbour held memory at its start; {asked} is tried again once it fits"
        fits = show(UTILIZATION, launch.room.fits)
        return f"a neighbour held memory at its start; {fits} would fit now" + (
            "" if name in climbing else f", {asked} is tried again once it fits"
        )
    step = f"`vllm-supervise step {name.replace('_', '-')} up` raises it"
    if policy.rung(name) is None:
        return "it has no rung in the ladder any more, so nothing moves it"
    if name not in climbing:
        return f"a failure lowered it and the service can do the same without it; only pressure raises it, or {step}"
    declared = launch.target.with_(**{name: policy.declared.get(name, False)})
    seen = known(policy, state, now_ns).against(pinned(declared, launch.ledger))
    if seen is None:
        return "a failure lowered it; nothing that is known forbids what is declared"
    ago = max(0, state.wall_s(now_ns) - seen.wall_s)
    return (
        f"what is declared was seen to fail ({seen.kind.value}) {telling.span(ago * SECOND)} ago, which is forgotten"
        f" {telling.span((LIFETIME_S - ago) * SECOND)} from now; less than that is tried before"
    )


def _next(
    policy: Policy, state: State, launch: Launch, now_ns: int, climbing: tuple[str, ...]
) -> tuple[str, int | None]:
    if not climbing:
        return "nothing of that comes back by itself", None
    if launch.serving_ns is None:
        return "first it must pass its proof", None
    if launch.proposed:
        return ("a step up is on its way" if policy.act else "it was said when it was due (act = false)"), None
    comes = climb_occasion(policy, state)
    if comes is None:
        return "nothing of that comes back by itself", None
    if launch.after_ns > now_ns:
        return "nothing that is not known to fail is left to try before", launch.after_ns
    tries = f", after {state.failed_climbs} that failed" if state.failed_climbs else ""
    return f"a step up{tries}, {comes.waits_for or 'once it has served for long enough'}", comes.at_ns
