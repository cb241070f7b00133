"""Sentences: every decision as one text that a person can act on.

Each names the failure, a number that proves it, the old and the new value, the next step and a command. Text from logs
is quoted, bounded and stripped of control characters: it is hostile.
"""

from __future__ import annotations

from collections.abc import Mapping

from supervisord_vllm.core.case import Case
from supervisord_vllm.core.decision import Move
from supervisord_vllm.core.diagnosis import Direction, Kind
from supervisord_vllm.core.facts import DeviceMemory, Exited, ProcessRef
from supervisord_vllm.core.ledger import Room, gib, requested, to_bytes
from supervisord_vllm.core.levers import UTILIZATION, show
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.soaking import SIGNATURE

LABELS: Mapping[str, str] = {UTILIZATION: "utilization"}

STAGES: Mapping[Kind, str] = {
    Kind.OOM_WEIGHTS: "while loading the weights",
    Kind.OOM_PROFILE: "in the profile run",
    Kind.OOM_SAMPLER_WARMUP: "while warming up the sampler",
    Kind.OOM_CUDAGRAPH: "while capturing CUDA graphs",
    Kind.OOM_KV_ALLOC: "while allocating the KV cache",
    Kind.OOM_LORA: "with its LoRA adapters",
    Kind.OOM_RUNTIME: "while serving",
    Kind.OOM_MM: "in a multimodal request",
}


def quoted(text: str, limit: int = 240) -> str:
    """Log text for a sentence: one line, printable, bounded, in quotes."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    clean = " ".join(clean.split())
    return f"“{clean[: limit - 1]}…”" if len(clean) > limit else f"“{clean}”"


def span(ns: int) -> str:
    """A duration: ``45 s``, ``2.5 s``, ``10 min``, ``1 h``."""
    seconds = ns / SECOND
    if seconds >= 3600 and seconds % 3600 == 0:
        return f"{seconds / 3600:.0f} h"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 or seconds == int(seconds) else f"{seconds:.1f} s"


def begin_again(policy: Policy) -> str:
    """What a person does after the fix, in words that fit behind "then"."""
    return "start the daemon again" if policy.on_give_up == "exit" else "`vllm-supervise start`"


def moved(moves: tuple[Move, ...]) -> str:
    """``utilization 0.900 → 0.741`` for every move."""
    return ", ".join(
        f"{LABELS.get(move.lever, move.lever)} {show(move.lever, move.before)} → {show(move.lever, move.after)}"
        for move in moves
    )


def way(before: object, after: object) -> Direction:
    """The direction of a move."""
    if not isinstance(before, int) or not isinstance(after, int) or isinstance(after, bool):
        return "switch"
    return "up" if after > before else "down"


def exit_words(exited: Exited | None) -> str:
    """How the main process ended."""
    if exited is None:
        return "still running"
    if exited.signal is not None:
        return f"ended by signal {exited.signal}"
    return "exit status unknown" if exited.code is None else f"exit status {exited.code}"


def _size(numbers: Mapping[str, object], name: str) -> str | None:
    value = numbers.get(name)
    return gib(to_bytes(value)) if isinstance(value, (int, float)) else None


def _neighbour(case: Case) -> str:
    if case.holder is None:
        return ""
    if case.grown:
        return f"; {case.holder} took {gib(case.grown)} since the start"
    held = case.holder.memory_bytes
    return f"; {case.holder} holds {gib(held)}" if held else f"; {case.holder} holds memory there"


def happened(case: Case, exited: Exited | None, suspicion: str = "") -> str:
    """The failure with its numbers, as the middle of a sentence that begins with ``Launch N``."""
    diagnosis, kind = case.diagnosis, case.diagnosis.kind
    numbers = case.numbers.numbers
    if kind in STAGES:
        tried, free = _size(diagnosis.numbers, "tried_gib"), _size(diagnosis.numbers, "free_gib")
        sizes = f" (tried {tried}, {free} free)" if tried and free else f" (tried {tried})" if tried else ""
        short = f"is too large for its memory: {suspicion}"
        ran_out = f"ran out of GPU memory {STAGES[kind]}{sizes}"
        return (short if diagnosis.signature == SIGNATURE else ran_out) + _neighbour(case)
    if kind is Kind.GPU_BUSY_FOREIGN and diagnosis.number("free_gib") is not None:
        util = diagnosis.number("util")
        asked = f"utilization {util:.3f}" if util is not None else "the request"
        return (
            f"was refused by vLLM: {_size(numbers, 'free_gib')} of {_size(numbers, 'total_gib')} are free and {asked}"
            f" asks for {_size(numbers, 'requested_gib')}{_neighbour(case)}"
        )
    if kind is Kind.KV_LEN_TOO_LONG and "max_model_len" in numbers:
        length = numbers["max_model_len"]
        limit = numbers.get("estimated_max_len")
        estimate = f"; vLLM estimates that {limit:,} fit" if isinstance(limit, int) else ""
        # vLLM prints two decimals: for a small model both sizes read 0.0 and would only confuse.
        sizes = (
            f"needs {_size(numbers, 'needed_kv_gib')} of KV cache and {_size(numbers, 'available_kv_gib')} are there"
            if case.numbers.size("needed_kv_gib") and case.numbers.size("available_kv_gib")
            else "needs more KV cache than there is"
        )
        return f"cannot serve one request of {length:,} tokens: it {sizes}{estimate}"
    if kind is Kind.KV_NO_BLOCKS:
        there = case.numbers.size("available_kv_gib")
        short = f": {gib(-there)} are missing" if there is not None and there < 0 else ""
        return f"has no memory left for the KV cache after weights and activations{short}{_neighbour(case)}"
    if kind is Kind.ENGINE_DEAD:
        if suspicion:
            return f"is dead: {suspicion}"
        return f"died while serving and named no cause ({exit_words(exited)})"
    if kind is Kind.ENGINE_HUNG:
        return f"hangs: {suspicion or 'no progress'}"
    if kind is Kind.STARTUP_WEDGED:
        return f"does not come up: {suspicion or 'no progress'}"
    if kind is Kind.NONE:
        return f"ended without an error in its output ({exit_words(exited)})"
    first = quoted(diagnosis.evidence[0].text) if diagnosis.evidence else "no error line"
    if kind is Kind.BAD_CONFIG:
        return f"was refused by vLLM as it is configured: {first}"
    if kind is Kind.UNKNOWN:
        why = f"; {suspicion}" if suspicion else ""
        return f"failed in a way that no signature explains ({exit_words(exited)}{why}): {first}"
    return f"failed ({kind.value}, {exit_words(exited)}): {first}"


def owner(process: ProcessRef) -> str:
    """A process that is not ours, with its user: ``pid 77 (nginx), user bob``."""
    return f"{process}, user {process.user}" if process.user else str(process)


def gate_short(tight: Room, utilization: int, holder: ProcessRef | None) -> str:
    """Why memory keeps the gate shut."""
    user = f" (user {holder.user})" if holder and holder.user else ""
    who = f"; {holder} holds {gib(holder.memory_bytes)}{user}" if holder and holder.memory_bytes else ""
    return (
        f"{gib(tight.free)} of {gib(tight.total)} are free on {tight.name} and utilization"
        f" {show(UTILIZATION, utilization)} asks for {gib(requested(utilization, tight.total))}{who}"
    )


def largest_holder(devices: tuple[DeviceMemory, ...], before: tuple[DeviceMemory, ...] = ()) -> ProcessRef | None:
    """The process that is not ours and took most memory since ``before``; without it, the one that holds most."""
    earlier = {(d.device, h.pid): h.memory_bytes or 0 for d in before for h in d.holders}
    foreign = [
        ((h.memory_bytes or 0) - earlier.get((d.device, h.pid), 0), h.memory_bytes or 0, -h.pid, h)
        for d in devices
        for h in d.holders
        if not h.ours
    ]
    return max(foreign, key=lambda f: f[:3])[3] if foreign else None
