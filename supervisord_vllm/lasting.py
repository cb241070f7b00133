"""What outlives a boot: an operator's hold, and what the way back up counts.

The state counts in CLOCK_BOOTTIME, which begins anew with each boot; the store keeps wall time. A hold keeps both, so
that a wall clock that is set within one boot makes it neither longer nor shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from supervisord_vllm.clock import SECOND_NS, rfc3339
from supervisord_vllm.core.facts import Hold

if TYPE_CHECKING:  # `status` reads a hold without a daemon, and needs no machine for it
    from supervisord_vllm.core.state import State

Json: TypeAlias = Any
HELD = "held"
PLANNED = "planned"
_DAY_NS = 24 * 3600 * SECOND_NS
_LATEST_S = 250_000_000_000
"""Wall times that can be shown: up to the year 9,892."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """What an earlier run left, in CLOCK_BOOTTIME of this boot: moments before it are negative."""

    hold: Hold | None = None
    failed_climbs: int = 0
    roll_backs: dict[str, int] = field(default_factory=dict)
    planned: tuple[int, ...] = ()


def counts_key(fingerprint: str) -> str:
    """Where the counts of one policy are kept: an edited wish is tried, and not made to wait for what another cost."""
    return f"way-back:{fingerprint}"


def entries(state: State, boot_id: str, fingerprint: str) -> dict[str, Json]:
    """The store's meta values that say it; ``None`` where there is nothing to remember.

    A step up that runs and is not proven counts as failed: a host that dies of it must not try it again at once.
    """
    hold, launch = state.hold, state.launch
    trying = launch is not None and launch.probe is not None and launch.probe.why == "step-up" and not launch.proven
    failed = state.failed_climbs + (trying and state.name.value in ("starting", "proving"))
    counts = {"failed_climbs": failed, "roll_backs": dict(state.roll_backs)}
    return {
        HELD: None
        if hold is None
        else {
            "by": hold.by,
            "reason": hold.reason,
            "since": state.wall_s(hold.since_ns),
            "until": None if hold.until_ns is None else state.wall_s(hold.until_ns),
            "boot": boot_id,
            "since_ns": hold.since_ns,
            "until_ns": hold.until_ns,
        },
        counts_key(fingerprint): counts if failed or any(state.roll_backs.values()) else None,
        PLANNED: [state.wall_s(at) for at in state.planned] or None,
    }


def lasting(held: Json, counts: Json, planned: Json, *, boot_id: str, now_ns: int, wall_s: int) -> Lasting:
    """The inverse of `entries`; what cannot be read is forgotten, and so is what is over."""

    def moment(wall: int) -> int:
        return now_ns + (wall - wall_s) * SECOND_NS

    known = counts if isinstance(counts, dict) else {}
    failed, rolled = known.get("failed_climbs"), known.get("roll_backs")
    times = [min(now_ns, moment(at)) for at in planned if _whole(at)] if isinstance(planned, list) else []
    return Lasting(
        hold=_hold(held, boot_id, now_ns, wall_s),
        failed_climbs=max(0, min(failed, 64)) if _whole(failed) else 0,
        roll_backs={str(verdict): count for verdict, count in rolled.items() if _whole(count)}
        if isinstance(rolled, dict)
        else {},
        planned=tuple(sorted(at for at in times if at > now_ns - _DAY_NS)),
    )


def _hold(held: Json, boot_id: str, now_ns: int, wall_s: int) -> Hold | None:
    if held is True:  # as it was kept before a hold had a name
        return Hold(since_ns=now_ns)
    if not isinstance(held, dict):
        return None

    def moment(name: str) -> int | None:
        exact, wall = held.get(f"{name}_ns"), held.get(name)
        if held.get("boot") == boot_id and _whole(exact):
            return exact
        return now_ns + (wall - wall_s) * SECOND_NS if _whole(wall) else None

    since, until = moment("since"), moment("until")
    if until is not None and until <= now_ns:
        return None
    return Hold(str(held.get("by") or ""), str(held.get("reason") or ""), now_ns if since is None else since, until)


def hold_document(held: Json, wall_s: float) -> dict[str, Any] | None:
    """A recorded hold as ``status --json`` shows it where no daemon runs; ``None`` where none lasts."""
    if not isinstance(held, dict):
        return {"by": None, "reason": None, "since": None, "until": None} if held is True else None
    since, until = held.get("since"), held.get("until")
    if _whole(until) and until <= wall_s:
        return None
    return {
        "by": held.get("by") or None,
        "reason": held.get("reason") or None,
        "since": rfc3339(since) if _whole(since) and 0 <= since < _LATEST_S else None,
        "until": rfc3339(until) if _whole(until) and 0 <= until < _LATEST_S else None,
    }


def _whole(value: Json) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
