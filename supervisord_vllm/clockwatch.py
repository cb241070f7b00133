"""The wall clock while the daemon runs: whether it was set, and whether summer time began or ended.

Intervals are counted in CLOCK_BOOTTIME and do not care; windows in local time, and observations that age, do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from supervisord_vllm.clock import Now, utc_offset_s
from supervisord_vllm.core.facts import ClockSeen
from supervisord_vllm.core.state import State

EVERY_S = 5.0
SET_S = 2
"""Both clocks are read one after the other and rounded to seconds: a smaller difference is none."""


def clock_seen(state: State, now: Now, offset_s: int) -> ClockSeen | None:
    """The fact that the clock is not what the state believes; ``None`` where it is."""
    wall_s = int(now.wall)
    moved = wall_s - state.wall_s(now.boottime_ns)
    if abs(moved) <= SET_S and offset_s == state.utc_offset_s:
        return None
    return ClockSeen(at_ns=now.boottime_ns, wall_s=wall_s, utc_offset_s=offset_s)


async def watch_clock(post: Callable[[ClockSeen], None], state: Callable[[], State]) -> None:
    """Look again and again; nothing moves between two looks that a window would notice."""
    while True:
        await asyncio.sleep(EVERY_S)
        seen = clock_seen(state(), Now.read(), utc_offset_s())
        if seen is not None:
            post(seen)
