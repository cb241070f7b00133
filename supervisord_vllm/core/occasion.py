"""Occasion: when a planned change (a step up, a recycle) may begin, and what it waits for.

* Not while an operator holds the configuration.
* At most `Policy.planned_per_day` planned restarts in 24 h.
* With declared windows: inside of one, whether requests run or not; they are waited for by draining. Without: at a
  quiet moment, which is an engine without a request on two pages of its metrics in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.windows import until_open

if TYPE_CHECKING:  # the state's timers ask here
    from supervisord_vllm.core.state import State

DAY_NS = 24 * 3600 * SECOND


@dataclass(frozen=True, slots=True)
class Occasion:
    """The first moment (CLOCK_BOOTTIME) at which a change may begin; ``None`` where that is not a matter of time.
    ``waits_for`` says what for, to go on after "a step up, "; empty where nothing but time is in the way."""

    at_ns: int | None
    waits_for: str = ""


def occasion(policy: Policy, state: State, from_ns: int) -> Occasion:
    """The first occasion from a moment on, for the present launch."""
    at, waits = from_ns, ""
    if state.hold is not None:
        if state.hold.until_ns is None:
            return Occasion(None, "once `vllm-supervise resume` ends the hold")
        if state.hold.until_ns > at:
            at, waits = state.hold.until_ns, "once the hold is over"
    if policy.planned_per_day == 0:
        return Occasion(None, "never by itself (planned-per-day = 0)")
    if len(state.planned) >= policy.planned_per_day:
        free = state.planned[-policy.planned_per_day] + DAY_NS
        if free > at:
            at, waits = free, f"once fewer than {policy.planned_per_day} planned restarts were made within 24 h"
    if policy.windows:
        shut = until_open(policy.windows, at // SECOND + state.wall_offset_s + state.utc_offset_s)
        names = " or ".join(map(str, policy.windows))
        return Occasion(at + shut * SECOND, f"within {names} local time" if shut else waits)
    if state.launch is None or state.launch.load != "idle":
        busy = "requests run or wait now" if state.launch and state.launch.load else "the engine's load is not known"
        return Occasion(None, waits or f"at a quiet moment ({busy})")
    return Occasion(at, waits)
