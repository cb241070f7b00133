"""What an operator is told about a verb, from the states before and after it."""

from __future__ import annotations

from supervisord_vllm.api import RefusedError
from supervisord_vllm.core.facts import Commanded
from supervisord_vllm.core.operating import why_no_step
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import State, StateName
from supervisord_vllm.core.telling import span


def reply(policy: Policy, said: Commanded, before: State, after: State) -> str:
    """One line.

    Raises:
        RefusedError: nothing was done; the text says why.
    """
    verb = said.verb
    if verb == "hold":
        lasts = "" if said.for_ns is None else f" for {span(said.for_ns)}"
        return (
            f"held{lasts}: a failure restarts the same configuration, within the budget, until"
            f" {'then or ' if lasts else ''}`vllm-supervise resume`"
        )
    if verb == "resume":
        return "resumed: a failure may change the configuration again"
    if verb == "reset":
        return "reset: failures, budget and the last known good are forgotten"
    if before.name is after.name and before.ending == after.ending:
        if verb == "stop" and after.name is StateName.STOPPED:
            return "already stopped"
        if verb == "step":
            raise RefusedError(why_no_step(policy, after, said.lever, said.direction))
        raise RefusedError(f"nothing to do, the instance is {after.name.value}")
    if after.ending is not None and after.ending.forced:
        return f"{verb}: nothing is waited for any more, the engine is killed"
    return f"{verb}: {before.name.value} → {after.name.value}"
