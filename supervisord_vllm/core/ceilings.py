"""Ceilings: how high a lever may stand at present.

That is its rung's ``max``, else what is declared, and for the utilization at most what fits beside a neighbour, where
that is known. A lever without a rung has none: nothing moves it. What a failure forbids is joint over all levers
(`core.feasibility`) and no number of one of them.
"""

from __future__ import annotations

from supervisord_vllm.core.levers import UTILIZATION, Levers, LeverValue
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import State


def ceilings(policy: Policy, state: State) -> Levers:
    """The ceilings of the levers that are numbers and may move."""
    found: dict[str, LeverValue] = {}
    for rung in policy.ladder:
        most = rung.max if rung.max is not None else policy.declared.number(rung.lever)
        if isinstance(most, int):
            found[rung.lever] = most
    room = state.launch.room if state.launch is not None else None
    highest = found.get(UTILIZATION)
    if room is not None and isinstance(highest, int):
        found[UTILIZATION] = min(highest, room.fits)
    return Levers(found)
