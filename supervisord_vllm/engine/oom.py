"""What an out-of-memory message says beside its size: who holds the card, whether it is memory at all, and which stage.

Sources: torch 2.1-2.13 ``c10/cuda/CUDACachingAllocator.cpp`` for the text; vLLM's call tree for the stages.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from supervisord_vllm.core.diagnosis import Action, Kind, Number
from supervisord_vllm.engine.frames import has
from supervisord_vllm.engine.signature import Catalogue, Cure, Outcome, number

if TYPE_CHECKING:
    from supervisord_vllm.core.facts import Phase

_PROCESS = re.compile(r"Process \d{1,10} has (?P<size_gib>[\d.]+ (?:bytes|KiB|MiB|GiB)) memory in use")

FRAGMENTED_SHARE = 0.05
"""Reserved but unallocated memory below this share of the card is normal, however small the failed allocation."""
ROOMY_GIB = 1.0
"""Free memory beyond twice the failed allocation that says: the limit is not the card."""

FRAGMENTATION = Outcome(
    id="oom-fragmentation",
    kind=Kind.OOM_FRAGMENTATION,
    action=Action.NEXT_CONFIG,
    cures=(Cure("env:PYTORCH_ALLOC_CONF", "switch", "=expandable_segments:True"),),
    summary=(
        "Fragmented: {torch_reserved_unallocated_gib:size} are reserved but unallocated, yet {tried_gib:size} failed.",
    ),
    advice=("Set PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9).",),
    confidence=0.9,
)
ENVIRONMENT_LIMIT = Outcome(
    id="oom-env-limit",
    kind=Kind.OOM_ENV_LIMIT,
    action=Action.STOP_EXPLAIN,
    summary=(
        "{tried_gib:size} failed with {free_gib:size} of {total_gib} GiB free: the limit is not the card (WSL, vGPU).",
    ),
    advice=("Look for a limit outside of vLLM (WSL's .wslconfig, the vGPU profile, per-process limits).",),
    confidence=0.85,
)


def holders(text: str, numbers: dict[str, Number]) -> None:
    """Add ``own_gib`` and ``foreign_gib`` from the processes that the message names.

    The message says "Including non-PyTorch memory, this process has ..." where the driver can tell; inside a container
    the own process may appear only as one of the "Process <pid> has ...": then it is the one nearest above its use.
    """
    sizes = [float(number("size_gib", match["size_gib"])) for match in _PROCESS.finditer(text)]
    allocated = numbers.get("torch_allocated_gib")
    if "own_gib" not in numbers and isinstance(allocated, (int, float)):
        own = min((size for size in sizes if size >= allocated), default=None)
        if own is not None:
            numbers["own_gib"] = own
            sizes.remove(own)
    if sizes:
        numbers["foreign_gib"] = round(sum(sizes), 4)


def outcome(
    catalogue: Catalogue, frames: tuple[str, ...], phase: Phase, numbers: dict[str, Number], *, serving: bool
) -> Outcome:
    """The verdict on an out-of-memory error: fragmentation and foreign limits first, then the stage."""
    tried, free, total = (_float(numbers, name) for name in ("tried_gib", "free_gib", "total_gib"))
    spare = _float(numbers, "torch_reserved_unallocated_gib")
    if tried is not None and total:
        if spare is not None and spare >= tried and spare >= FRAGMENTED_SHARE * total:
            return FRAGMENTATION
        if free is not None and free >= 2 * tried + ROOMY_GIB:
            return ENVIRONMENT_LIMIT
    when = "runtime" if serving else "startup"
    for stage in catalogue.stages:
        if stage.when != when or (stage.within and not has(frames, stage.within, every=True)):
            continue
        if stage.frames:
            if has(frames, stage.frames):
                return stage.outcome
        elif not stage.phases or phase in stage.phases:
            return stage.outcome
    raise AssertionError("the last stage of each list fits everything")  # pragma: no cover - a test reads the lists


def _float(numbers: dict[str, Number], name: str) -> float | None:
    value = numbers.get(name)
    return float(value) if isinstance(value, (int, float)) else None
