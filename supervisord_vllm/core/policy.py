"""The policy as the core sees it: plain frozen values, already validated (see `supervisord_vllm.config`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.levers import Levers, Rung
from supervisord_vllm.core.windows import Window

SECOND = 1_000_000_000
"""Nanoseconds in a second: every time in the core is an integer of nanoseconds."""


@dataclass(frozen=True, slots=True)
class Override:
    """``[policy.KIND]``: the remedies of one kind, replaced, or their order left to the ladder.

    ``remedies`` names levers (snake_case) or ``wait``, ``same-again``, ``reap``, ``clean``, ``stop``; ``None`` keeps
    the kind's own list.
    """

    remedies: tuple[str, ...] | None = None
    order: Literal["kind", "ladder"] = "kind"


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay before restart n (from 0): ``min(max_ns, first_ns * factor**n)``, with a jitter of at most 10 %."""

    first_ns: int = 2 * SECOND
    factor: float = 2.0
    max_ns: int = 300 * SECOND


@dataclass(frozen=True, slots=True)
class Gate:
    """Memory must be enough in every sample of the last ``window_ns``; a neighbour is waited for at most
    ``patience_ns`` when a fitting utilization is permitted, and anything at most ``deadline_ns``."""

    window_ns: int = 2 * SECOND
    patience_ns: int = 60 * SECOND
    deadline_ns: int = 600 * SECOND


@dataclass(frozen=True, slots=True)
class Pressure:
    """``[pressure]``: 95 % of the answers shall be faster than this; ``None``: no target. ``cost_ns`` is what a restart
    costs before any launch of ours has taught it."""

    ttft_ns: int | None = None
    inter_token_ns: int | None = None
    queue_ns: int | None = None
    cost_ns: int = 60 * SECOND


@dataclass(frozen=True, slots=True)
class Proof:
    """``[proof]`` beside canary and soak time: the burst, and whether the soak judges memory.

    ``concurrency`` requests at once (``None``: max_num_seqs, at most 32; 0: no burst) of about ``prompt_tokens``
    (``None``: together they fill one step of the engine) and ``output_tokens``; after ``burst_max_ns`` it is over."""

    concurrency: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 64
    burst_max_ns: int = 300 * SECOND
    memory: bool = True
    bounded: bool = True
    """Whether the utilization bounds the engine: an explicit size of the KV cache switches it off."""


@dataclass(frozen=True)
class Policy:
    """What the operator asked for and what may move. Times are nanoseconds."""

    name: str
    declared: Levers = field(default_factory=Levers)
    ladder: tuple[Rung, ...] = ()
    overrides: Mapping[Kind, Override] = field(default_factory=dict)
    act: bool = True
    on_give_up: Literal["exit", "stay"] = "exit"
    budget: int = 6
    window_ns: int = 3600 * SECOND
    max_launches: int = 12
    backoff: Backoff = Backoff()
    gate: Gate = Gate()
    start_max_ns: int = 3600 * SECOND
    stop_deadline_ns: int = 180 * SECOND
    """Longer than the longest stop that the policy permits: whatever still lives then cannot be ended."""
    soak_ns: int = 30 * SECOND
    proof: Proof | None = None
    """``None``: a proof is the canary and the time of the soak, and nothing else."""
    step_up_ns: int = 1800 * SECOND
    """Serving time before the way back to what is declared is tried."""
    windows: tuple[Window, ...] = ()
    """When a step up and a planned recycle may begin; none: at a quiet moment."""
    planned_per_day: int = 4
    drain_ns: int = 300 * SECOND
    """How long a planned change waits for running requests."""
    pressure: Pressure = Pressure()
    min_concurrency: float = 1.0
    allow: frozenset[str] = frozenset()
    fingerprint: str = ""
    """Hash of everything that makes two launches comparable: command, arguments, environment, declared levers."""
    surroundings: str = ""
    """The same without the declared levers: what observations of lever vectors belong to."""

    def rung(self, lever: str) -> Rung | None:
        """The permission to move a lever, or ``None``."""
        return next((rung for rung in self.ladder if rung.lever == lever), None)
