"""What stands beside the engine's own text changes the verdict: one table of rules, the first that applies counts.

Two sources feed it. `Outside` is what the caller knows: the kernel log, who holds the memory, the cgroup's OOM counter,
whether this very configuration was proven before. `Notes` is what the log itself holds that is no verdict: a journal's
exit status, a pasted ``nvidia-smi``, a lock that is waited for. Text alone never makes a rule change a configuration
that the engine's own failure would not have changed too, but for host memory, where the kernel's word is needed.

The numbers of a kind can ask for different actions: a shortfall of at most `SLIVER` of the card is fitted beside
at once (no neighbour gives just that back by leaving), a larger one is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from supervisord_vllm.core.diagnosis import Action, Diagnosis, Kind, Number
from supervisord_vllm.engine.notes import Notes
from supervisord_vllm.engine.signature import Cure, Outcome

if TYPE_CHECKING:
    from supervisord_vllm.core.facts import Phase, ProcessRef

SLIVER: Final = 0.01
"""Share of the card's memory; below it a shortfall is fitted beside instead of waited for."""
UNIFIED_GIB: Final = (110.0, 130.0)
"""Totals that only unified-memory machines have (GB10, Thor): no discrete card lies between 96 and 139 GiB."""
GROWN_GIB: Final = 0.5
"""A neighbour that took less than a CUDA context is not blamed."""
FALLEN: Final = 0.25
"""Available host memory that fell to this share of what it was, while it only fell: it runs out."""
SLOWER: Final = 0.8
CREPT: Final = 1.05
LOCK_WAIT_S: Final = 300.0
GROUP_WAIT_S: Final = 60.0
NOTICES_OF_A_WEDGE: Final = 10
"""Sixty-second notices without any progress before a start counts as wedged: compilation can take minutes."""
HARDWARE_XIDS: Final = frozenset({48, 62, 64, 74, 79, 92, 95, 110, 119, 120, 136, 140, 143, 154})
CONTAINED_XIDS: Final = frozenset({63, 94})
"""A row was remapped or an error contained: the same again once."""


@dataclass(frozen=True)
class Outside:
    """What is known beside the output; an empty value means unknown.

    ``kernel``: lines of the kernel log of the launch's time. ``buses``: PCI ids of the engine's GPUs (empty: every Xid
    counts). ``pids``: the engine's processes. ``holders``: who holds memory on its devices now that it is gone.
    ``oom_kills``: growth of ``oom_kill`` in the cgroup's memory.events. ``proven``: this configuration, fingerprint and
    levers alike, was proven before. ``foreign_grew_gib``: what processes that are not ours took since the gate.
    ``unified``: GPU memory is host memory. ``log_only``: nothing can be looked up, so that guesses from the log's own
    numbers are better than none.
    """

    kernel: tuple[str, ...] = ()
    buses: tuple[str, ...] = ()
    pids: frozenset[int] = frozenset()
    holders: tuple[ProcessRef, ...] = ()
    oom_kills: int = 0
    proven: bool = False
    foreign_grew_gib: float | None = None
    unified: bool | None = None
    log_only: bool = False


@dataclass(frozen=True)
class Situation:
    """A verdict from the text, with everything that may change it."""

    verdict: Diagnosis
    notes: Notes
    outside: Outside
    known: Mapping[str, Number]
    phase: Phase | None = None
    failed: bool = False
    serving: bool = False
    external_cache: bool = False
    stalled: int = 0
    exit_signal: int | None = None
    exit_code: int | None = None
    earlier: tuple[Diagnosis, ...] = ()

    def number(self, name: str) -> float | None:
        """A number of the verdict or of the launch's account, or ``None``."""
        value = self.known.get(name)
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def starting(self) -> bool:
        """Whether the engine had not served yet."""
        return not self.serving

    @property
    def ended(self) -> bool:
        """Whether something ended: text alone, while an engine serves on, is no evidence of its death."""
        return self.failed or self.exit_code is not None or self.exit_signal is not None or not self.serving

    @property
    def signal(self) -> int | None:
        """The signal that ended the engine or its worker, however it was told."""
        if self.exit_signal is not None:
            return self.exit_signal
        for code in (self.exit_code, self.number("exit_code")):
            if code is not None and (code < 0 or code > 128):
                return int(-code if code < 0 else code - 128)
        return None

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel (or who reads its counters) says that it killed an engine process for memory."""
        notes, outside = self.notes, self.outside
        if outside.oom_kills > 0 or any(
            n in notes for n in ("note-oom-systemd", "note-oom-result", "note-oom-kubernetes")
        ):
            return True
        killer = notes["note-oom-killer"]
        if killer is None:
            return False
        if outside.pids:
            return any(pid in outside.pids for pid in killer.values.get("pid", ()))
        victims = [str(victim).lower() for victim in killer.values.get("victim", ())]
        return any(victim.startswith(("vllm", "python", "ray", "pt_main")) for victim in victims)

    def xids(self, wanted: frozenset[int]) -> bool:
        """Whether one of these Xids came on a GPU of the engine's."""
        note = self.notes["note-xid"]
        if note is None or not any(xid in wanted for xid in note.values.get("xid", ())):
            return False
        buses = [_bus(str(bus)) for bus in note.values.get("bus", ())]
        return not self.outside.buses or any(_bus(ours) in buses for ours in self.outside.buses)

    @property
    def unified(self) -> bool:
        """Whether GPU memory is host memory: told, or by a size that only such machines have."""
        if self.outside.unified is not None:
            return self.outside.unified
        total = self.number("total_gib")
        return total is not None and UNIFIED_GIB[0] < total < UNIFIED_GIB[1]


def _bus(text: str) -> tuple[int, ...]:
    """``0000:48:00.0``, ``00000000:48:00.0`` and ``0000:48:00`` are one bus id; what is none is ``()``."""
    try:
        parts = [int(part, 16) for part in text.partition(".")[0].split(":")]
    except ValueError:
        return ()
    return (0, *parts)[-3:]


@dataclass(frozen=True)
class Rule:
    """One row. ``of`` are the kinds that it may change; ``when`` says in words what it looks for, ``applies`` in code.
    ``keep`` leaves the kind and changes only what is done. ``proof`` are the notes whose first lines become evidence,
    ``implies`` numbers that follow from the rule.
    """

    id: str
    of: frozenset[Kind]
    when: str
    applies: Callable[[Situation], bool]
    outcome: Outcome
    keep: bool = False
    proof: tuple[str, ...] = ()
    phase: str = ""
    implies: Mapping[str, Number] = field(default_factory=dict)


def first(situation: Situation) -> Rule | None:
    """The rule that applies, or ``None``."""
    for rule in RULES:
        if situation.verdict.kind in rule.of and rule.applies(situation):
            return rule
    return None


def _outcome(
    identity: str,
    kind: Kind,
    action: Action,
    summary: str | tuple[str, ...],
    advice: str,
    *cures: Cure,
    target: str | None = None,
    confidence: float = 0.9,
    context: tuple[str, ...] = (),
) -> Outcome:
    summaries = (summary,) if isinstance(summary, str) else summary
    return Outcome(identity, kind, action, cures, target, summaries, (advice,), confidence, context)


_UTIL_DOWN = Cure("gpu_memory_utilization", "down")
_FIT = Cure("gpu_memory_utilization", "down", "fit_free")
_DIED = frozenset({Kind.ENGINE_DEAD, Kind.WORKER_DIED, Kind.HOST_OOM, Kind.UNKNOWN})
_QUIET = frozenset({Kind.NONE, Kind.FALSE_ALARM, Kind.OVERLOAD})
_OOM = frozenset(
    {
        Kind.OOM_WEIGHTS,
        Kind.OOM_PROFILE,
        Kind.OOM_SAMPLER_WARMUP,
        Kind.OOM_CUDAGRAPH,
        Kind.OOM_KV_ALLOC,
        Kind.OOM_LORA,
        Kind.OOM_RUNTIME,
        Kind.OOM_MM,
    }
)
_FREE_HOST = (
    "Give the host or the container more memory, or lower what vLLM keeps there (--cpu-offload-gb, --swap-space)."
)


def _short(s: Situation) -> float:
    return s.number("shortfall_gib") or 0.0


def _sliver(s: Situation) -> bool:
    total = s.number("total_gib")
    return bool(total) and 0 < _short(s) <= SLIVER * (total or 0) and s.number("fit_free") is not None


def _own_holder(s: Situation) -> bool:
    if any(holder.ours for holder in s.outside.holders):
        return True
    held = s.notes.number("note-own-holder", "holder_mib")
    return held is not None and held / 1024 >= 0.5 * _short(s)


def _same_again(s: Situation) -> bool:
    """Three starts in a row that failed alike: what is taken does not come back by waiting."""
    busy = (Kind.GPU_BUSY_FOREIGN, Kind.GPU_BUSY_UMA)
    last = [d for d in s.earlier[-2:] if d.kind in busy and d.number("free_gib") == s.number("free_gib")]
    return len(last) == 2


def _neighbour_moved(s: Situation) -> bool:
    grew = s.outside.foreign_grew_gib
    missing = s.number("kv_deficit_gib") or s.number("kv_shortfall_gib") or GROWN_GIB
    return s.outside.proven or (grew is not None and grew >= max(GROWN_GIB, 0.5 * missing))


def _too_much_for_these_weights(s: Situation) -> bool:
    """Without any look outside: what is missing is more than twice the weights, so it was not ours alone."""
    weights, deficit = s.number("weights_gib"), s.number("kv_deficit_gib")
    return s.outside.log_only and weights is not None and deficit is not None and deficit > max(2.0, 2 * weights)


def _grew_into_it(s: Situation) -> bool:
    grew, tried, free = s.outside.foreign_grew_gib, s.number("tried_gib"), s.number("free_gib")
    return grew is not None and grew >= max(GROWN_GIB, (tried or 0.0) - (free or 0.0))


def _killed_at_kv(s: Situation) -> bool:
    sized = s.number("gpu_blocks") is not None or s.number("kv_tokens") is not None
    return s.verdict.signature == "killed" and s.starting and sized and s.phase != "capturing"


def _fell_away(s: Situation) -> bool:
    note = s.notes["note-available-memory"]
    if note is None or not note.fell_throughout or not s.starting:
        return False
    begin, end = note.first.get("available_gib"), note.number("available_gib")
    return isinstance(begin, (int, float)) and end is not None and end <= FALLEN * float(begin)


def _gpu_gone(s: Situation) -> bool:
    return ("note-gpu-gone" in s.notes or s.xids(HARDWARE_XIDS)) and (s.failed or not s.serving)


def _loading_on(s: Situation) -> bool:
    note = s.notes["ledger-shards"]
    return note is not None and note.rises > 0


def _wedged(s: Situation) -> bool:
    waits = s.notes.count("note-shm-wait")
    return s.starting and not _loading_on(s) and waits >= NOTICES_OF_A_WEDGE


def _standing_metrics(s: Situation) -> bool:
    tokens, running = s.notes["note-metrics-tokens"], s.notes.number("note-metrics-running", "running")
    return tokens is not None and tokens.count >= 2 and not (tokens.rises or tokens.falls) and bool(running)


def _crept(s: Situation) -> bool:
    note = s.notes["note-used-vram"]
    if note is None or not note.rose_throughout:
        return False
    begin, end = note.first.get("used_gib"), note.number("used_gib")
    return isinstance(begin, (int, float)) and end is not None and end >= CREPT * float(begin)


def _slower(s: Situation) -> bool:
    note = s.notes["note-slow-decode"]
    if note is None or note.count < 2:
        return False
    now, baseline = note.number("decode_tps"), note.number("baseline_tps")
    return now is not None and baseline is not None and now < SLOWER * baseline


def _unkillable(s: Situation) -> bool:
    stuck = ("note-unkillable", "note-unkillable-state", "note-unkillable-driver")
    return "note-kill-sent" in s.notes and any(note in s.notes for note in stuck)


def _terminated(s: Situation) -> bool:
    told = "note-terminated" in s.notes or "note-engine-sigterm" in s.notes
    ended = "note-exit-unasked" in s.notes or s.exit_code is not None or s.exit_signal is not None
    return s.starting and told and ended


RULES: Final[tuple[Rule, ...]] = (
    # --- host memory
    Rule(
        "oom-killer-beside-connector",
        _DIED | _QUIET,
        "the kernel killed the engine for memory while a KV connector kept a cache in host memory",
        lambda s: s.oom_killed and s.ended and s.serving and s.external_cache,
        _outcome(
            "oom-killer-beside-connector",
            Kind.HOST_OOM,
            Action.NEXT_CONFIG,
            "The kernel killed the engine because host memory ran out; a KV connector keeps a cache there.",
            "Switch the KV connector off (--kv-transfer-config) or bound its memory, then look whether host "
            "memory still grows.",
            Cure("kv_transfer_config", "switch"),
            confidence=0.85,
        ),
        proof=("note-oom-killer", "note-oom-systemd"),
        implies={"signal": 9},
    ),
    Rule(
        "oom-killer-page-cache",
        _DIED | _QUIET,
        "the kernel killed the engine while weights were loaded, and the driver took GPU memory from the host's",
        lambda s: s.oom_killed and s.starting and "note-gpu-memory-is-host-memory" in s.notes,
        _outcome(
            "oom-killer-page-cache",
            Kind.HOST_OOM,
            Action.CLEAN,
            "Unified memory ran out while loading: the page cache of the checkpoint takes what the GPU needs.",
            "Drop the page cache (`sync; echo 3 > /proc/sys/vm/drop_caches`) and start again with the same flags.",
            target="drop_page_cache",
            confidence=0.85,
        ),
        proof=("note-oom-killer", "note-gpu-memory-is-host-memory"),
    ),
    Rule(
        "oom-killer-unified",
        _DIED | _QUIET,
        "the kernel killed the engine for memory on a machine whose GPU memory is host memory",
        lambda s: s.oom_killed and s.ended and s.unified,
        _outcome(
            "oom-killer-unified",
            Kind.HOST_OOM,
            Action.NEXT_CONFIG,
            "The kernel killed the engine because host memory ran out; on this machine it is the GPU's memory too.",
            "Lower --gpu-memory-utilization: here it is host memory.",
            _UTIL_DOWN,
        ),
        proof=("note-oom-killer",),
    ),
    Rule(
        "oom-killer",
        _DIED | _QUIET,
        "the kernel log, memory.events, systemd or the kubelet says that an engine process was killed for memory",
        lambda s: s.oom_killed and s.ended,
        _outcome(
            "oom-killer",
            Kind.HOST_OOM,
            Action.STOP_EXPLAIN,
            "The kernel killed the engine because the host (or its cgroup) ran out of memory.",
            _FREE_HOST,
            confidence=0.95,
        ),
        proof=("note-oom-killer", "note-oom-systemd", "note-oom-result", "note-oom-kubernetes"),
        implies={"signal": 9},
    ),
    Rule(
        "killed-at-kv-allocation",
        frozenset({Kind.HOST_OOM}),
        "killed without a word right after the KV cache was sized, before anything was captured",
        _killed_at_kv,
        _outcome(
            "killed-at-kv-allocation",
            Kind.HOST_OOM,
            Action.NEXT_CONFIG,
            "The engine was killed while it took its KV cache: on this machine GPU memory is host memory.",
            "Lower --gpu-memory-utilization: on unified memory it is host memory.",
            _UTIL_DOWN,
            confidence=0.7,
            context=("weights_gib", "gpu_blocks", "kv_tokens", "max_model_len", "max_num_seqs", "util", "total_gib"),
        ),
    ),
    Rule(
        "host-memory-fell-away",
        _DIED | _QUIET,
        "samples of available host memory only fell during the start, to a quarter or less",
        _fell_away,
        _outcome(
            "host-memory-fell-away",
            Kind.HOST_OOM,
            Action.KILL_TREE_NEXT_CONFIG,
            "Available host memory falls away during the start: the host is about to freeze.",
            "End the start, and lower --gpu-memory-utilization: on unified memory it is host memory.",
            _UTIL_DOWN,
            confidence=0.75,
            context=("weights_gib", "util", "total_gib", "requested_gib"),
        ),
        proof=("note-available-memory",),
    ),
    # --- hardware and driver
    Rule(
        "gpu-hardware",
        frozenset(
            {*_DIED, *_QUIET, Kind.CUDA_FAULT, Kind.ENGINE_HUNG, Kind.NCCL_HANG, Kind.GPU_HW_FAULT, Kind.ENGINE_BUG}
        ),
        "an Xid that means hardware (48, 62, 64, 74, 79, 95, 119, 154 …) on a GPU of ours, or the driver "
        "lost the GPU; not "
        "while the engine serves on",
        _gpu_gone,
        _outcome(
            "gpu-hardware",
            Kind.GPU_HW_FAULT,
            Action.STOP_OPERATOR,
            ("The driver reports a GPU fault (Xid {xid}).", "The driver reports that it lost a GPU."),
            "Reset the card or reboot the host, and look the Xid up in NVIDIA's table; no configuration helps.",
            confidence=0.92,
        ),
        proof=("note-xid", "note-gpu-gone"),
    ),
    Rule(
        "gpu-hardware-contained",
        frozenset({*_DIED, Kind.CUDA_FAULT, Kind.GPU_HW_FAULT}),
        "Xid 63 or 94 on a GPU of ours: the error was contained",
        lambda s: s.xids(CONTAINED_XIDS),
        _outcome(
            "gpu-hardware-contained",
            Kind.GPU_HW_FAULT,
            Action.RESTART_SAME,
            "The driver contained a memory error of the GPU (Xid {xid}).",
            "Start again with the same flags once; if it repeats, reset or replace the card.",
            confidence=0.85,
        ),
        proof=("note-xid",),
    ),
    Rule(
        "nvml-broken",
        frozenset({Kind.NONE, Kind.UNKNOWN, Kind.FALSE_ALARM}),
        "NVML cannot be initialised (driver upgraded under way, or a container lost its devices)",
        lambda s: "note-nvml-broken" in s.notes,
        _outcome(
            "nvml-broken",
            Kind.ENV_BROKEN,
            Action.STOP_OPERATOR,
            "The driver does not answer (NVML): it was upgraded under way, or the container lost its devices.",
            "Restart the container (after `systemctl daemon-reload` on the host), or reboot the host after a "
            "driver upgrade.",
        ),
        proof=("note-nvml-broken",),
    ),
    Rule(
        "nvml-not-supported",
        frozenset({Kind.NONE}),
        "NVML answers that it cannot say (unified memory, MIG)",
        lambda s: "note-nvml-not-supported" in s.notes,
        _outcome(
            "nvml-not-supported",
            Kind.NVML_UNSUPPORTED,
            Action.NO_ACTION,
            "NVML cannot tell the memory of this GPU (unified memory): read host memory instead.",
            "Nothing to do.",
        ),
        proof=("note-nvml-not-supported",),
    ),
    # --- memory that others hold
    Rule(
        "held-by-our-own",
        frozenset({Kind.GPU_BUSY_FOREIGN, Kind.GPU_BUSY_UMA}),
        "a process of ours (a holder that is ours; `VLLM::…` in a pasted nvidia-smi) holds at least half of "
        "what is missing",
        _own_holder,
        _outcome(
            "held-by-our-own",
            Kind.GPU_BUSY_ORPHAN,
            Action.REAP,
            "{free_gib} GiB of {total_gib} GiB were free at start: an engine process of an earlier launch "
            "still holds the rest.",
            "End the orphan (its title is `VLLM::EngineCore`), wait until its memory is back, and start "
            "again with the same flags.",
            confidence=0.93,
        ),
        proof=("note-own-holder",),
    ),
    Rule(
        "sliver",
        frozenset({Kind.GPU_BUSY_FOREIGN}),
        "at most 1 % of the card is missing",
        _sliver,
        _outcome(
            "sliver",
            Kind.GPU_BUSY_FOREIGN,
            Action.NEXT_CONFIG,
            "{free_gib} GiB of {total_gib} GiB were free at start, utilization {util} asks for {requested_gib} GiB: "
            "{shortfall_gib:size} are missing.",
            "Set --gpu-memory-utilization {fit_free:.3f}: so little is not worth waiting for.",
            _FIT,
            confidence=0.95,
        ),
        keep=True,
    ),
    Rule(
        "unified-memory-does-not-come-back",
        frozenset({Kind.GPU_BUSY_FOREIGN}),
        "unified memory, and three starts in a row found the same amount free",
        lambda s: s.unified and _same_again(s),
        _outcome(
            "unified-memory-does-not-come-back",
            Kind.GPU_BUSY_UMA,
            Action.STOP_EXPLAIN,
            "{free_gib} GiB of {total_gib} GiB were free in three starts in a row: on unified memory what a "
            "failed start "
            "leaked does not come back.",
            "Drop the page cache or reboot the host; further starts only leak more.",
            confidence=0.85,
        ),
    ),
    Rule(
        "unified-memory-taken",
        frozenset({Kind.GPU_BUSY_FOREIGN}),
        "unified memory: page cache and leaked mappings look like a neighbour",
        lambda s: s.unified,
        _outcome(
            "unified-memory-taken",
            Kind.GPU_BUSY_UMA,
            Action.WAIT_VRAM,
            "{free_gib} GiB of {total_gib} GiB of unified memory were free at start, utilization {util} asks for "
            "{requested_gib} GiB.",
            "End what else uses the host's memory, drop the page cache, and start again with the same flags.",
            _FIT,
            confidence=0.75,
        ),
    ),
    Rule(
        "neighbour-while-measuring",
        frozenset({Kind.KV_NO_BLOCKS, Kind.KV_LEN_TOO_LONG}),
        "this configuration was proven before, or a neighbour took memory since the gate",
        _neighbour_moved,
        _outcome(
            "neighbour-while-measuring",
            Kind.GPU_PROFILING_RACE,
            Action.RESTART_SAME,
            "There was no room for the KV cache although this configuration has been proven: memory moved while vLLM "
            "measured.",
            "Start again with the same flags once memory is still; the configuration is not at fault.",
            confidence=0.85,
            context=("available_kv_gib", "util", "total_gib"),
        ),
    ),
    Rule(
        "more-than-the-weights",
        frozenset({Kind.KV_NO_BLOCKS}),
        "nothing can be looked up, and more than twice the weights is missing: another engine started at the same time",
        _too_much_for_these_weights,
        _outcome(
            "more-than-the-weights",
            Kind.GPU_PROFILING_RACE,
            Action.RESTART_SAME,
            "The KV cache would be {available_kv_gib} GiB beside weights of {weights_gib} GiB: more is "
            "missing than this "
            "engine took, so another process took memory while vLLM measured.",
            "Start engines on one GPU one after another, and start again with the same flags.",
            confidence=0.6,
            context=("available_kv_gib", "util", "total_gib", "weights_gib"),
        ),
    ),
    Rule(
        "neighbour-grew",
        _OOM,
        "a neighbour took at least what was missing since the gate",
        _grew_into_it,
        _outcome(
            "neighbour-grew",
            Kind.OOM_RUNTIME,
            Action.WAIT_VRAM,
            "GPU memory ran out because another process took some meanwhile: tried {tried_gib:size}, "
            "{free_gib:size} free.",
            "Wait until it leaves, or lower --gpu-memory-utilization to what fits beside it; the "
            "configuration is not at fault.",
            _UTIL_DOWN,
            confidence=0.85,
        ),
        keep=True,
    ),
    # --- adapters
    Rule(
        "oom-with-adapters-at-start",
        frozenset({Kind.OOM_SAMPLER_WARMUP, Kind.OOM_PROFILE, Kind.OOM_KV_ALLOC}),
        "--enable-lora was given",
        lambda s: "note-lora-enabled" in s.notes,
        _outcome(
            "oom-with-adapters-at-start",
            Kind.OOM_LORA,
            Action.NEXT_CONFIG,
            "Memory ran out during the start of an engine with LoRA slots.",
            "Lower --max-loras or --max-lora-rank, then --max-num-seqs.",
            Cure("max_loras", "down"),
            Cure("max_num_seqs", "down"),
            Cure("max_lora_rank", "down"),
            confidence=0.75,
            context=("util", "max_loras", "max_lora_rank", "max_num_seqs"),
        ),
        proof=("note-lora-enabled",),
    ),
    Rule(
        "oom-with-adapters-serving",
        frozenset({Kind.OOM_RUNTIME}),
        "the requests before it used a LoRA adapter",
        lambda s: "note-lora-request" in s.notes,
        _outcome(
            "oom-with-adapters-serving",
            Kind.OOM_LORA,
            Action.NEXT_CONFIG,
            "A request with a LoRA adapter ran out of GPU memory: tried {tried_gib:size}, {free_gib:size} free.",
            "Lower --max-num-batched-tokens (the adapters' buffers grow with it), then --gpu-memory-utilization.",
            Cure("max_num_batched_tokens", "down"),
            _UTIL_DOWN,
            confidence=0.75,
            context=("util",),
        ),
    ),
    # --- processes
    Rule(
        "cannot-be-killed",
        frozenset({*_QUIET, *_DIED}),
        "SIGKILL was sent and the process is still there (D state, spinning in the driver)",
        _unkillable,
        _outcome(
            "cannot-be-killed",
            Kind.STOP_HANG,
            Action.STOP_OPERATOR,
            "A process does not end by SIGKILL: it is stuck in the kernel or the driver.",
            "Only a reset of the GPU or a reboot of the host ends it; do not start another engine on this card.",
        ),
        proof=("note-unkillable", "note-unkillable-state", "note-unkillable-driver"),
        phase="shutdown",
    ),
    Rule(
        "killed-by-a-probe",
        frozenset({*_QUIET, Kind.ENGINE_DEAD}),
        "a liveness probe failed while weights were still being loaded",
        lambda s: s.starting and "note-probe-refused" in s.notes and _loading_on(s),
        _outcome(
            "killed-by-a-probe",
            Kind.SLOW_STARTUP,
            Action.WAIT,
            "The start was going on ({shards_done} of {shards_total} shards) when a liveness probe had it killed.",
            "Give the probe a start-up time that covers the loading (startupProbe, initialDelaySeconds).",
        ),
        proof=("note-probe-refused",),
    ),
    Rule(
        "terminated-during-the-start",
        frozenset({*_QUIET, Kind.ENGINE_DEAD}),
        "SIGTERM came during the start although nobody of ours sent it",
        _terminated,
        _outcome(
            "terminated-during-the-start",
            Kind.SLOW_STARTUP,
            Action.RESTART_SAME,
            "The start was ended by a SIGTERM from outside.",
            "Find who sends it (a start timeout: TimeoutStartSec=, a probe), and start again with the same flags.",
            confidence=0.8,
        ),
        proof=("note-terminated", "note-engine-sigterm"),
    ),
    Rule(
        "bus-error",
        _DIED,
        "ended by SIGBUS (7): memory-mapped memory that could not be had",
        lambda s: s.signal == 7,
        _outcome(
            "bus-error",
            Kind.SHM_EXHAUSTED,
            Action.CLEAN,
            "A process was ended by SIGBUS: /dev/shm is too small or full.",
            "Remove left-overs of dead engines in /dev/shm, or enlarge it (--shm-size, --ipc=host).",
            target="dev_shm",
            confidence=0.75,
        ),
    ),
    Rule(
        "illegal-instruction",
        _DIED,
        "ended by SIGILL (4): the build uses instructions that this CPU does not have",
        lambda s: s.signal == 4,
        _outcome(
            "illegal-instruction",
            Kind.ENV_BROKEN,
            Action.STOP_EXPLAIN,
            "A process was ended by SIGILL: this build uses instructions that the CPU does not have.",
            "Install a build for this CPU, or another --dtype (bfloat16 needs AVX512-BF16 or AMX in some builds).",
            confidence=0.8,
        ),
    ),
    # --- standing still
    Rule(
        "slow-load",
        frozenset({Kind.NONE}),
        "sixty-second notices, but the loading of weights goes on",
        lambda s: s.starting and "note-shm-wait" in s.notes and _loading_on(s),
        _outcome(
            "slow-load",
            Kind.SLOW_STARTUP,
            Action.WAIT,
            "The start is slow but goes on: {shards_done} of {shards_total} shards are loaded.",
            "Wait; faster storage, or the page cache, would help the next start.",
            confidence=0.85,
        ),
        proof=("note-shm-wait",),
    ),
    Rule(
        "stale-lock",
        frozenset({Kind.NONE, Kind.ENGINE_DEAD}),
        "a lock is waited for: the hub's for five minutes, or a JIT baton through three sixty-second notices",
        lambda s: (
            s.starting
            and (
                (s.notes.number("note-hub-lock", "waited_s") or 0) >= LOCK_WAIT_S
                or ("note-jit-baton" in s.notes and s.notes.count("note-shm-wait") >= 3)
            )
        ),
        _outcome(
            "stale-lock",
            Kind.STARTUP_WEDGED,
            Action.CLEAN,
            "The start waits for a lock whose owner is gone.",
            "End the start, move the lock file that is named aside (no process may hold it: `fuser`), and start again.",
            target="stale_locks",
            confidence=0.85,
        ),
        proof=("note-hub-lock", "note-jit-baton"),
    ),
    Rule(
        "placement-group-never-comes",
        frozenset({Kind.NONE}),
        "Ray has been asked for more than it has for a minute",
        lambda s: s.starting and (s.notes.number("note-placement-group", "waited_s") or 0) >= GROUP_WAIT_S,
        _outcome(
            "placement-group-never-comes",
            Kind.STARTUP_WEDGED,
            Action.STOP_EXPLAIN,
            "The start waits for GPUs that the Ray cluster does not have.",
            "Compare `ray status` with --tensor-parallel-size times --pipeline-parallel-size, and the nodes' "
            "VLLM_HOST_IP.",
            confidence=0.85,
        ),
        proof=("note-placement-group",),
    ),
    Rule(
        "start-stands-still",
        frozenset({Kind.NONE}),
        "ten sixty-second notices during the start and nothing that moves",
        _wedged,
        _outcome(
            "start-stands-still",
            Kind.STARTUP_WEDGED,
            Action.KILL_TREE_RESTART,
            "The start has not moved for many minutes.",
            "End the whole process tree and start again with the same flags.",
            confidence=0.7,
        ),
        proof=("note-shm-wait",),
    ),
    Rule(
        "workers-do-not-answer",
        frozenset({Kind.NONE, Kind.OVERLOAD}),
        "two sixty-second notices while serving, and the last load line shows requests and no token",
        lambda s: s.serving and s.notes.count("note-shm-wait") >= 2 and s.stalled > 0,
        _outcome(
            "workers-do-not-answer",
            Kind.ENGINE_HUNG,
            Action.KILL_TREE_RESTART,
            "The workers have not answered for minutes while requests wait: the engine hangs.",
            "End the whole process tree (EngineCore survives its server) and start again with the same flags.",
            confidence=0.8,
        ),
        proof=("note-shm-wait",),
    ),
    Rule(
        "metrics-stand-still",
        frozenset({Kind.NONE, Kind.OVERLOAD}),
        "two looks at /metrics show requests running and not one token more",
        _standing_metrics,
        _outcome(
            "metrics-stand-still",
            Kind.ENGINE_HUNG,
            Action.KILL_TREE_RESTART,
            "No token came out between two looks at /metrics while requests ran: the engine hangs.",
            "End the whole process tree (EngineCore survives its server) and start again with the same flags.",
            confidence=0.85,
        ),
        proof=("note-metrics-tokens",),
    ),
    # --- nothing failed
    Rule(
        "slower-than-itself",
        _QUIET,
        "decoding is slower than its own baseline by a fifth, more than once",
        _slower,
        _outcome(
            "slower-than-itself",
            Kind.PERF_REGRESSION,
            Action.STOP_OPERATOR,
            "Decoding is slower than its own baseline without more load: the GPU is throttled or stuck at a low clock.",
            "Look at clocks, power and throttle reasons (`nvidia-smi -q -d CLOCK,PERFORMANCE`); a power "
            "cycle may be needed.",
            confidence=0.75,
        ),
        proof=("note-slow-decode",),
        phase="runtime",
    ),
    Rule(
        "vram-creeps",
        _QUIET,
        "GPU memory of the idle engine only ever grew, by 5 % or more",
        _crept,
        _outcome(
            "vram-creeps",
            Kind.VRAM_CREEP,
            Action.PLANNED_RECYCLE,
            "GPU memory of the idle engine grows from sample to sample.",
            "Restart the engine at a quiet moment, after a drain, before it runs out; report the leak.",
            confidence=0.8,
            context=("util", "max_model_len"),
        ),
        proof=("note-used-vram",),
        phase="runtime",
    ),
    Rule(
        "preempted",
        frozenset({Kind.NONE}),
        "V0's warning that sequences are preempted",
        lambda s: "note-preempted-v0" in s.notes,
        _outcome(
            "preempted",
            Kind.OVERLOAD,
            Action.OBSERVE,
            "Sequences are preempted: the KV cache is too small for the load.",
            "Fewer --max-num-seqs, or more KV cache (--gpu-memory-utilization up, fp8), help latency; it is "
            "no failure.",
            confidence=0.8,
        ),
        proof=("note-preempted-v0",),
        phase="runtime",
    ),
)

NOTE_IDS: Final = frozenset(note for rule in RULES for note in rule.proof)


@dataclass(frozen=True)
class Told:
    """An exit that the log itself tells of (a journal, a supervisor, docker)."""

    exit_code: int | None = None
    exit_signal: int | None = None
    numbers: Mapping[str, Number] = field(default_factory=dict)


def told_exit(notes: Notes) -> Told:
    """The last exit that the notes tell of."""
    systemd, child = notes["note-exit-systemd"], notes["note-exit-child"]
    for note in (systemd, child):
        if note is None:
            continue
        signal, code = note.number("signal"), note.number("exit_code")
        if signal is not None:
            return Told(exit_signal=int(signal))
        if code is not None and code >= 0:
            return Told(exit_code=int(code))
        if code is not None:
            return Told(exit_signal=int(-code))
    return Told()
