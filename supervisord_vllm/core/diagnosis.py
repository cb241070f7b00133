"""The vocabulary of failures: kinds, actions, and the verdict that names the first cause of an incident."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal


class Kind(str, Enum):
    """What a failure is. The value is the public name in JSON and metrics; TOML writes it in kebab-case."""

    GPU_BUSY_FOREIGN = "gpu_busy_foreign"
    GPU_BUSY_ORPHAN = "gpu_busy_orphan"
    GPU_BUSY_UMA = "gpu_busy_uma"
    GPU_PROFILING_RACE = "gpu_profiling_race"
    KV_NO_BLOCKS = "kv_no_blocks"
    KV_LEN_TOO_LONG = "kv_len_too_long"
    KV_STATE_SLOTS = "kv_state_slots"
    OOM_WEIGHTS = "oom_weights"
    OOM_PROFILE = "oom_profile"
    OOM_SAMPLER_WARMUP = "oom_sampler_warmup"
    OOM_CUDAGRAPH = "oom_cudagraph"
    OOM_KV_ALLOC = "oom_kv_alloc"
    OOM_LORA = "oom_lora"
    OOM_FRAGMENTATION = "oom_fragmentation"
    OOM_ENV_LIMIT = "oom_env_limit"
    OOM_RUNTIME = "oom_runtime"
    OOM_MM = "oom_mm"
    VRAM_CREEP = "vram_creep"
    HOST_OOM = "host_oom"
    SHM_EXHAUSTED = "shm_exhausted"
    OS_LIMIT = "os_limit"
    ENGINE_DEAD = "engine_dead"
    ENGINE_HUNG = "engine_hung"
    STARTUP_WEDGED = "startup_wedged"
    SLOW_STARTUP = "slow_startup"
    WORKER_DIED = "worker_died"
    NCCL_HANG = "nccl_hang"
    ENGINE_BUG = "engine_bug"
    POISON_REQUEST = "poison_request"
    STOP_HANG = "stop_hang"
    CUDA_FAULT = "cuda_fault"
    GPU_HW_FAULT = "gpu_hw_fault"
    ENV_BROKEN = "env_broken"
    NVML_UNSUPPORTED = "nvml_unsupported"
    BAD_CONFIG = "bad_config"
    PORT_IN_USE = "port_in_use"
    COMPILE_CACHE_CORRUPT = "compile_cache_corrupt"
    HUB_TRANSIENT = "hub_transient"
    HUB_DENIED = "hub_denied"
    WEIGHTS_CORRUPT = "weights_corrupt"
    OVERLOAD = "overload"
    PERF_REGRESSION = "perf_regression"
    FALSE_ALARM = "false_alarm"
    NONE = "none"
    UNKNOWN = "unknown"


class Action(str, Enum):
    """What is done about a failure; the value is the public name in JSON and metrics."""

    NEXT_CONFIG = "next_config"
    RESTART_SAME = "restart_same"
    WAIT_VRAM = "wait_vram_then_retry_same"
    WAIT_PORT = "wait_port_then_retry_same"
    REAP = "reap_orphans_then_retry_same"
    CLEAN = "clean_state_then_retry_same"
    RETRY_OFFLINE = "retry_same_offline"
    KILL_TREE_RESTART = "kill_tree_then_restart_same"
    KILL_TREE_NEXT_CONFIG = "kill_tree_then_next_config"
    WAIT = "wait"
    OBSERVE = "observe"
    NO_ACTION = "no_action"
    PLANNED_RECYCLE = "planned_recycle"
    STOP_EXPLAIN = "stop_explain"
    STOP_OPERATOR = "stop_operator"


Direction = Literal["up", "down", "switch"]
Number = int | float | str


@dataclass(frozen=True, slots=True)
class Change:
    """One lever that would cure a kind, its direction and, where the log prints it, the value (JSON form)."""

    lever: str
    direction: Direction
    to: Number | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One line of output that carries the verdict: its number in the file from 1, the process role and the text."""

    line: int
    role: str
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """The first cause of an incident.

    ``numbers`` use canonical names; a name that ends in ``_gib`` is in GiB, ``_s`` in seconds, ``util`` is a fraction.
    ``signature`` is stable for "the same failure again": the id of the matched message, and for an unknown failure its
    first error line with digits removed. ``confidence`` is 0 to 1.
    """

    kind: Kind
    phase: str = "startup"
    action: Action = Action.NO_ACTION
    change: tuple[Change, ...] = ()
    target: str | None = None
    numbers: Mapping[str, Number] = field(default_factory=dict)
    confidence: float = 0.0
    evidence: tuple[Evidence, ...] = ()
    summary: str = ""
    advice: str = ""
    signature: str = ""

    def number(self, name: str) -> float | None:
        """A numeric value by its canonical name, or ``None``."""
        value = self.numbers.get(name)
        return float(value) if isinstance(value, (int, float)) else None
