"""The proof of a launch as questions: which part it is in, how large its burst is, when its soak is over.

The parts are, in order, the canary (one token; the engine is ready after it), the burst (many requests at once) and the
soak (time, with an eye on memory). Everything is derived from the launch, so that a daemon that takes over in the
middle knows where to go on. `core.proving` acts on the answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from supervisord_vllm.core import telling
from supervisord_vllm.core.actions import Burst
from supervisord_vllm.core.levers import BATCHED_TOKENS, NUM_SEQS
from supervisord_vllm.core.policy import SECOND, Policy

if TYPE_CHECKING:
    from supervisord_vllm.core.state import Launch

Part = Literal["canary", "burst", "soak"]
PARTS: tuple[Part, ...] = ("canary", "burst", "soak")

MOST_REQUESTS = 32
"""Requests of a burst where the policy names no number: enough for every step that a batch is made of."""
LONGEST_PROMPT = 2048
STEP_TOKENS = 2048
"""vLLM's smallest default of max_num_batched_tokens: what a step takes where the launch does not say."""
DYING_NS = 6 * SECOND
"""An engine that fails a burst because it is dying exits within this; then the exit is the better witness."""


def part(policy: Policy, launch: Launch) -> Part:
    """The part of the proof that a launch is in."""
    if launch.ready_ns is None:
        return "canary"
    if launch.burst is None:
        return "burst" if burst_of(policy, launch) is not None else "soak"
    return "soak" if launch.burst.ok else "burst"


def burst_of(policy: Policy, launch: Launch) -> Burst | None:
    """The burst of a launch; ``None`` where the policy wants none.

    Without a declared length the prompts together fill one step of the engine (max_num_batched_tokens), so that the
    burst meets the whole activation memory, once.
    """
    proof = policy.proof
    if proof is None or proof.concurrency == 0:
        return None
    requests = proof.concurrency
    if requests is None:
        slots = launch.levers.number(NUM_SEQS) or launch.ledger.count(NUM_SEQS) or MOST_REQUESTS
        requests = max(1, min(slots, MOST_REQUESTS))
    prompt = proof.prompt_tokens
    if prompt is None:
        step = launch.levers.number(BATCHED_TOKENS) or launch.ledger.count(BATCHED_TOKENS) or STEP_TOKENS
        prompt = max(16, min(-(-step // requests), LONGEST_PROMPT))
    return Burst(launch.number, requests, prompt, proof.output_tokens, proof.burst_max_ns)


def soak_began_ns(policy: Policy, launch: Launch) -> int | None:
    """When the soak began; ``None`` before that."""
    if part(policy, launch) != "soak":
        return None
    return launch.ready_ns if launch.burst is None else launch.burst.at_ns


def soak_due_ns(policy: Policy, launch: Launch) -> int | None:
    """When the soak is over; ``None`` before it began."""
    began = soak_began_ns(policy, launch)
    return None if began is None else began + policy.soak_ns


def next_wake_ns(policy: Policy, launch: Launch) -> int | None:
    """When a proof wants a tick: the end of the soak, or of the time that a failed burst is given to exit."""
    if launch.burst is not None and not launch.burst.ok:
        return launch.burst.at_ns + DYING_NS
    if not launch.ready or launch.unhealthy_ns is not None or (launch.weighed and launch.soak is None):
        return None
    return soak_due_ns(policy, launch)


def coming(policy: Policy, launch: Launch) -> tuple[str, int | None]:
    """What a proof waits for, and until when (CLOCK_BOOTTIME ns; ``None`` where no time is fixed)."""
    now = part(policy, launch)
    if now == "canary":
        return "the canary's answer", None
    if now == "burst":
        if launch.burst is not None:
            return "the burst failed: its end is waited for, then it is ended", launch.burst.at_ns + DYING_NS
        burst = burst_of(policy, launch)
        assert burst is not None
        assert launch.ready_ns is not None
        return f"a soak, once the burst of {burst.requests} requests is answered", launch.ready_ns + burst.max_ns
    return "proven when the soak is over", soak_due_ns(policy, launch)


def failed_in(policy: Policy, launch: Launch, now_ns: int) -> str:
    """The part of the proof in which a launch failed, as a sentence and a blank; empty where it was in none."""
    if policy.proof is None or launch.healthy_ns is None or launch.proven:
        return ""
    now = part(policy, launch)
    if now == "canary":
        return "Its proof failed in the canary, its first request. "
    if now == "soak":
        began = soak_began_ns(policy, launch)
        assert began is not None
        return f"Its proof failed in the soak, after {telling.span(now_ns - began)}. "
    if launch.burst is None:
        burst = burst_of(policy, launch)
        return f"Its proof failed in the burst of {burst.requests if burst else 0} requests. "
    return f"Its proof failed in the burst: {burst_words(launch)}. "


def burst_words(launch: Launch) -> str:
    """What came of a burst that failed: ``3 of 16 requests failed (“500 …”)``."""
    seen = launch.burst
    assert seen is not None
    why = f" ({telling.quoted(seen.detail, 160)})" if seen.detail else ""
    if seen.silent:
        within = telling.span(round(seen.seconds * SECOND))
        return f"none of {seen.requests} requests got an answer within {within}{why}"
    return f"{seen.failed} of {seen.requests} requests failed{why}"
