"""A card, its neighbours and one vLLM launch in virtual time: a pure function from settings and faults to a course.

Neighbours come and go at fixed times, so a whole launch can be told when it starts: what it prints, when it answers,
how and when it fails. Names of failures are the public ones (docs/diagnosis.md); numbers are rounded as vLLM prints
them. The account is `simulation.ledger`'s, with what reality adds: context, sampler state and warm-up that no printed
term counts, the gap between a cold and a warm compile cache, growth of a neighbour charged to the profile run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from supervisord_vllm.simulation.card import Card, Device, Model
from supervisord_vllm.simulation.fault import Fault
from supervisord_vllm.simulation.ledger import (
    Settings,
    account,
    activation,
    capture_counts,
    forward_pieces,
    graph_bytes,
    kv_bytes_per_token,
    sequence_state,
    warm_up_bytes,
    weight_pieces,
    weights_bytes,
)
from supervisord_vllm.simulation.quantity import GIB, MIB, gib, torch_size

Number = int | float | str
PIECE = 64 * MIB
"""Graphs and warm-up allocate in pieces of about this size: what a failed allocation has "tried"."""
DYING_S = 4.6
"""Between a fatal line of the engine core and the exit: /health says 503."""
FIRST_S = 0.1
"""From healthy to the moment at which the first request is in the engine."""
BURST_S = 0.8
"""From healthy to the moment at which a burst is in the engine."""
PEAK_S = 5.0
"""After a change of free memory, the next request that needs the whole activation comes within this."""
VERSION = "0.26.0"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A process of somebody else that holds memory from ``since_s`` to ``until_s`` (``None``: for good)."""

    since_s: float
    bytes: int
    until_s: float | None = None
    pid: int = 2712
    user: str = "ada"
    command: str = "python"

    def holds(self, at_s: float) -> int:
        """Bytes held at a moment."""
        there = self.since_s <= at_s and (self.until_s is None or at_s < self.until_s)
        return self.bytes if there else 0


@dataclass(frozen=True)
class Neighbours:
    """All of them. The sum never exceeds the card: who comes last gets what is left."""

    each: tuple[Neighbour, ...] = ()

    def held(self, at_s: float) -> int:
        """Bytes that are not ours at a moment."""
        return sum(one.holds(at_s) for one in self.each)

    def holders(self, at_s: float) -> tuple[Neighbour, ...]:
        """Who holds memory at a moment, the largest first."""
        found = (one for one in self.each if one.holds(at_s))
        return tuple(sorted(found, key=lambda one: (-one.bytes, one.pid)))

    def changes(self) -> tuple[float, ...]:
        """The moments at which anything changes, in order."""
        ends = (one.until_s for one in self.each if one.until_s is not None)
        return tuple(sorted({*(one.since_s for one in self.each), *ends}))

    def next_change(self, after_s: float) -> float | None:
        """The first change after a moment."""
        return next((at for at in self.changes() if at > after_s), None)

    def also(self, *more: Neighbour) -> Neighbours:
        """With more of them."""
        return Neighbours((*self.each, *more))


@dataclass(frozen=True, slots=True)
class Failure:
    """How a launch fails: the public name of its kind, what vLLM prints of it, and its exit."""

    kind: str
    text: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    signature: str = ""
    code: int | None = 1
    signal: int | None = None
    phase: Literal["startup", "runtime"] = "startup"


Happening = Literal["phase", "ledger", "healthy", "unhealthy", "fatal", "exit", "stalled", "wedged", "kernel"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a supervisor sees, at a virtual time in seconds. ``name`` is a phase or a text."""

    at_s: float
    what: Happening
    name: str = ""
    numbers: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class Course:
    """One launch: what happens if nobody stops it. ``own`` are the bytes it holds from a moment on, in order."""

    events: tuple[Event, ...]
    failure: Failure | None
    own: tuple[tuple[float, int], ...]
    kv_tokens: int = 0
    canary: bool = True
    strikes_s: float | None = None
    """When the failure of a service begins."""
    stop_s: float = 1.0
    orphan_s: float = 0.0

    def held(self, at_s: float) -> int:
        """Bytes that the engine holds at a moment."""
        return next((size for since, size in reversed(self.own) if since <= at_s), 0)

    @property
    def healthy_s(self) -> float | None:
        """When /health first says 200."""
        return next((event.at_s for event in self.events if event.what == "healthy"), None)


class _Ended(Exception):  # noqa: N818 - not an error: it unwinds a start
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.kind)
        self.failure = failure


def launch(
    card: Card,
    model: Model,
    settings: Settings,
    neighbours: Neighbours,
    *,
    start_s: float,
    cold: bool,
    faults: Sequence[Fault] = (),
    horizon_s: float = 10 * 86400.0,
    burst: int = 0,
) -> Course:
    """The course of one launch that starts at ``start_s``. ``faults`` are those of this launch. Its first request comes
    when it is healthy, then ``burst`` requests at once."""
    return _Launch(card, model, settings, neighbours, start_s, cold, faults, horizon_s, burst).course()


def _printed(size: int) -> float:
    return float(gib(size))


class _Launch:
    def __init__(
        self,
        card: Card,
        model: Model,
        settings: Settings,
        neighbours: Neighbours,
        start_s: float,
        cold: bool,
        faults: Sequence[Fault],
        horizon_s: float,
        burst: int,
    ) -> None:
        self.card, self.model, self.settings, self.neighbours = card, model, settings, neighbours
        self.device: Device = card.device
        self.faults, self.cold, self.now = faults, cold, start_s
        self.horizon = horizon_s
        self.burst = burst
        self.strikes: float | None = None
        self.events: list[Event] = []
        self.own: list[tuple[float, int]] = [(start_s, 0)]
        self.used = 0
        self.kv_tokens = 0
        extra = self._fault("needs-more")
        self.more = extra.bytes or 0 if extra is not None else 0

    def _fault(self, kind: str, at: str = "") -> Fault | None:
        return next((f for f in self.faults if f.kind == kind and f.at == at), None)

    @property
    def free(self) -> int:
        """What is free on the card for another allocation of the engine."""
        return self.device.usable - self.neighbours.held(self.now) - self.used

    def course(self) -> Course:
        failure: Failure | None = None
        try:
            self._start()
            failure = self._serve()
        except _Ended as ended:
            failure = ended.failure
            if failure.kind != "startup_wedged":
                self._event("exit")
        stop = 1.0
        if self._fault("swallow-term") is not None:
            stop = 31.0
        if self._fault("ignore-term") is not None or self._fault("term-hang") is not None:
            stop = 33.0
        orphan = self._fault("orphan")
        return Course(
            tuple(self.events),
            failure,
            tuple(self.own),
            self.kv_tokens,
            self._fault("lying-health") is None,
            self.strikes,
            stop,
            0.0 if orphan is None else orphan.seconds or 30.0,
        )

    # --- time, memory, faults ---

    def _event(self, what: Happening, name: str = "", numbers: Mapping[str, Number] | None = None) -> None:
        self.events.append(Event(self.now, what, name, numbers or {}))

    def _pass(self, seconds: float) -> None:
        slow = self._fault("slow-start")
        self.now += seconds * (1.0 if slow is None else slow.factor)

    def _take(self, size: int) -> None:
        self.used += size
        self.own.append((self.now, self.used))

    def _allocate(self, size: int, piece: int, kind: str, stage: str) -> None:
        """Take memory, or fail as torch does: with the piece that did not fit any more."""
        if size <= self.free:
            self._take(size)
            return
        fitted = max(0, self.free) // max(1, piece) * piece
        self._take(min(size, fitted))
        raise _Ended(self._out_of_memory(kind, piece, stage))

    def _out_of_memory(self, kind: str, tried: int, stage: str, free: int | None = None) -> Failure:
        free = max(0, min(self.free, tried - MIB)) if free is None else free
        total = self.device.usable
        text = (
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {torch_size(tried)}. GPU 0 has a total"
            f" capacity of {torch_size(total)} of which {torch_size(free)} is free."
        )
        numbers = {"tried_gib": round(tried / GIB, 4), "free_gib": round(free / GIB, 4), "total_gib": _printed(total)}
        return Failure(
            kind, text, numbers, f"oom-{stage}", 0 if stage == "running" else 1, None,
            "runtime" if stage == "running" else "startup",
        )  # fmt: skip

    def _strike(self, stage: str) -> None:
        """Faults of a stage of the start."""
        for fault in self.faults:
            if fault.at != stage:
                continue
            if fault.kind == "oom":
                tried = fault.bytes or 2 * PIECE
                raise _Ended(self._out_of_memory(_STAGE_KINDS[stage], tried, stage, tried // 3))
            if fault.kind == "die":
                text = "RuntimeError: Engine core initialization failed. See root cause above."
                raise _Ended(Failure("unknown", text, signature=f"died-{stage}"))
            if fault.kind == "exit":
                raise _Ended(Failure("none", "", signature=f"exit-{stage}", code=fault.code))
            if fault.kind == "unknown":
                raise _Ended(
                    Failure("unknown", "RuntimeError: something nobody has seen", signature=f"unknown-{stage}")
                )
            if fault.kind == "hang":
                self._pass(300.0)
                self._event("wedged", f"no new line of output for 300 s in {stage}")
                raise _Ended(Failure("startup_wedged", "", signature=f"wedged-{stage}", code=None, signal=9))

    # --- a start ---

    def _start(self) -> None:
        timing, model, settings = self.card.timing, self.model, self.settings
        self._event("phase", "importing")
        for kind, failure in _REFUSALS.items():
            if self._fault(kind) is not None:
                self._pass(timing.imports / 2)
                raise _Ended(failure)
        self._pass(timing.imports)
        if settings.max_model_len > model.max_model_len:
            text = (
                f"Value error, User-specified max_model_len ({settings.max_model_len}) is greater than the derived"
                f" max_model_len (max_position_embeddings={model.max_model_len})"
            )
            raise _Ended(Failure("bad_config", text, {"derived_max_model_len": model.max_model_len}, "model-len"))
        self._strike("importing")
        self._pass(timing.spawn)
        self._event(
            "ledger",
            numbers={
                "version": VERSION,
                "max_model_len": settings.max_model_len,
                "max_num_seqs": settings.max_num_seqs,
                "max_num_batched_tokens": settings.max_num_batched_tokens,
            },
        )
        self._check_free()
        first = self.neighbours.held(self.now)
        self._load()
        self._profile(first)
        self._warm_up()
        self._pass(2.0)
        self._event("phase", "serving")
        self._event("healthy")

    def _check_free(self) -> None:
        self._take(self.device.context)
        total = self.device.usable
        requested = -(-round(self.settings.utilization * 1000) * total // 1000)
        if requested <= self.free:
            return
        free, wish = _printed(self.free), _printed(requested)
        text = (
            f"ValueError: Free memory on device cuda:0 ({free}/{_printed(total)} GiB) on startup is less than desired"
            f" GPU memory utilization ({self.settings.utilization:g}, {wish} GiB)."
        )
        numbers = {
            "free_gib": free,
            "total_gib": _printed(total),
            "util": self.settings.utilization,
            "requested_gib": wish,
        }
        raise _Ended(Failure("gpu_busy_foreign", text, numbers, "free-below-wish"))

    def _load(self) -> None:
        model, method = self.model, self.settings.quantization
        self._event("phase", "weights")
        self._strike("loading")
        self._pass(self.card.timing.weights * max(0.2, weights_bytes(model, method) / (14.32 * GIB)))
        largest = max(weight_pieces(model, method))
        self._allocate(weights_bytes(model, method), largest, "oom_weights", "loading")
        self._allocate(model.non_torch + self.more, PIECE, "oom_weights", "loading")
        self._event(
            "ledger",
            numbers={
                "weights_gib": _printed(weights_bytes(model, method)),
                "total_gib": _printed(self.device.usable),
                "util": self.settings.utilization,
            },
        )

    def _profile(self, first: int) -> None:
        timing, model, settings = self.card.timing, self.model, self.settings
        self._event("phase", "compiling")
        if not settings.eager:
            self._pass(timing.compile_cold if self.cold else timing.compile_warm)
        self._event("phase", "profiling")
        self._strike("profiling")
        self._pass(timing.profile)
        peak = activation(model, settings, self.cold and not settings.eager)
        piece = max(forward_pieces(model, settings.max_num_batched_tokens, settings.quantization))
        if peak > self.free:
            raise _Ended(self._out_of_memory("oom_profile", piece, "profiling", self._left(peak, piece)))
        grown = max(0, self.neighbours.held(self.now) - first)
        ledger = account(self.device, model, settings, self.cold and not settings.eager, grown)
        kv = ledger.kv - self.more
        self._event(
            "ledger",
            numbers={
                "activation_gib": _printed(ledger.activation),
                "non_torch_gib": _printed(ledger.non_torch + self.more),
                "available_kv_gib": _printed(kv),
                **({"compile_cold_s": self.card.timing.compile_cold} if self.cold and not settings.eager else {}),
            },
        )
        printed = {"available_kv_gib": _printed(kv), "total_gib": _printed(self.device.usable)}
        if kv <= 0:
            text = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
            raise _Ended(Failure("kv_no_blocks", text, printed, "no-blocks"))
        needed = ledger.needed(settings.max_model_len)
        tokens = kv // ledger.block_bytes * 16
        if needed > kv:
            text = (
                f"ValueError: To serve at least one request with the model's max seq len ({settings.max_model_len}),"
                f" ({_printed(needed)} GiB KV cache is needed, which is larger than the available KV cache memory"
                f" ({_printed(kv)} GiB). Based on the available memory, the estimated maximum model length is {tokens}."
            )
            numbers = {
                **printed,
                "max_model_len": settings.max_model_len,
                "needed_kv_gib": _printed(needed),
                "estimated_max_len": tokens,
            }
            raise _Ended(Failure("kv_len_too_long", text, numbers, "too-long"))
        self.kv_tokens = tokens
        self._event("ledger", numbers={"kv_tokens": tokens})
        self._strike("kv-alloc")
        self._allocate(sequence_state(model, settings.max_num_seqs), PIECE, "oom_kv_alloc", "kv-alloc")
        size = tokens * kv_bytes_per_token(model, settings.kv_cache_dtype)
        self._allocate(size, max(1, size // model.layers), "oom_kv_alloc", "kv-alloc")

    def _warm_up(self) -> None:
        timing, model, settings = self.card.timing, self.model, self.settings
        self._event("phase", "capturing")
        if sum(capture_counts(settings)):
            self._strike("capture")
            self._pass(timing.capture)
            self._allocate(graph_bytes(model, settings), PIECE, "oom_cudagraph", "capture")
            self._event("ledger", numbers={"graphs_gib": _printed(graph_bytes(model, settings))})
        self._strike("warm-up")
        self._pass(timing.warm_up)
        self._allocate(warm_up_bytes(model, settings.max_num_seqs), PIECE, "oom_sampler_warmup", "warm-up")

    # --- service ---

    def _serve(self) -> Failure | None:
        """What ends the service first: a scheduled fault, or a moment at which the activation does not fit."""
        healthy = self.now
        ends = [
            (healthy + after, number, fault)
            for number, fault in enumerate(self.faults)
            if fault.at == "running" and (after := self._after(fault)) is not None
        ]
        first = min(ends, key=lambda end: end[:2], default=None)
        short = self._short_of_activation(healthy)
        if short is not None and (first is None or short <= first[0]):
            self.now = self.strikes = short
            peak, piece = activation(self.model, self.settings, cold=False), self._peak_piece()
            return self._dies(self._out_of_memory("oom_runtime", piece, "running", self._left(peak, piece)))
        if first is None:
            return None
        self.now = self.strikes = first[0]
        return self._strike_running(first[2])

    def _after(self, fault: Fault) -> float | None:
        """Seconds from healthy to a fault of the service; ``None`` where it never strikes."""
        if fault.after is not None:
            return fault.after
        if fault.at_once is not None:
            return BURST_S if fault.at_once <= self.burst else None
        if fault.counted and fault.after_requests == 1:
            return FIRST_S
        return BURST_S if fault.counted and fault.after_requests <= 1 + self.burst else 60.0

    def _left(self, peak: int, piece: int) -> int:
        """What is free when the last, largest piece of a peak is asked for."""
        return max(0, min(piece - MIB, self.free - (peak - piece)))

    def _peak_piece(self) -> int:
        return max(forward_pieces(self.model, self.settings.max_num_batched_tokens, self.settings.quantization))

    def _short_of_activation(self, healthy: float) -> float | None:
        """The first moment of service at which the whole activation is not free any more."""
        peak = activation(self.model, self.settings, cold=False)
        moments = (healthy, *(at for at in self.neighbours.changes() if healthy < at < self.horizon))
        for at in moments:
            if self.device.usable - self.neighbours.held(at) - self.used < peak:
                return at + (BURST_S if self.burst and at == healthy else PEAK_S)
        return None

    def _dies(self, failure: Failure) -> Failure:
        self._event("fatal", "EngineCore encountered a fatal error.")
        self.now += DYING_S
        self._event("exit")
        return failure

    def _strike_running(self, fault: Fault) -> Failure:
        if fault.kind == "oom":
            tried = fault.bytes or 110 * MIB
            return self._dies(self._out_of_memory("oom_runtime", tried, "running", tried // 3))
        if fault.kind == "hang":
            self.now += 90.0
            text = (
                "no token came out for 90 s although 3 requests ran or waited, and a request of one token got no byte"
            )
            self._event("stalled", text)
            return Failure("engine_hung", "", signature="hung", code=None, signal=9, phase="runtime")
        if fault.kind == "exit":
            self._event("exit")
            return Failure("none", "", signature="exit-running", code=fault.code, phase="runtime")
        if fault.kind == "xid":
            self._event(
                "kernel", f"NVRM: Xid (PCI:0000:3b:00): {fault.code}, GPU has fallen off the bus.", {"xid": fault.code}
            )
        kind, text = _RUNNING.get(fault.kind, ("engine_dead", ""))
        return self._dies(Failure(kind, text, signature=f"{kind}-running", code=0, phase="runtime"))


_STAGE_KINDS = {
    "loading": "oom_weights",
    "profiling": "oom_profile",
    "kv-alloc": "oom_kv_alloc",
    "capture": "oom_cudagraph",
    "warm-up": "oom_sampler_warmup",
}
_RUNNING = {
    "unknown": ("unknown", "RuntimeError: something nobody has seen"),
    "xid": ("cuda_fault", "RuntimeError: CUDA error: unspecified launch failure"),
    "cuda-fault": ("cuda_fault", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    "fragmentation": ("oom_fragmentation", "torch.OutOfMemoryError: 9.1 GiB is reserved by PyTorch but unallocated."),
    "host-oom": ("host_oom", "the kernel's OOM killer ended one of our processes"),
}
_REFUSALS = {
    "missing-model": Failure("hub_denied", "OSError: it is not a valid model identifier", signature="hub-denied"),
    "bad-flag": Failure(
        "bad_config", "vllm: error: unrecognized arguments: --frobnicate", signature="argparse", code=2
    ),
    "hub-outage": Failure("hub_transient", "requests.exceptions.ConnectionError: huggingface.co", signature="hub"),
    "corrupt-cache": Failure("compile_cache_corrupt", "EOFError: Ran out of input", signature="compile-cache"),
}
EXTRA_FAULTS: Mapping[str, tuple[str, ...]] = {
    "bad-flag": (),
    "hub-outage": (),
    "corrupt-cache": (),
    "needs-more": (),
    "lying-health": (),
    "orphan": (),
    "xid": ("running",),
    "cuda-fault": ("running",),
    "fragmentation": ("running",),
    "host-oom": ("running",),
}
"""Faults of virtual time only, with the stages where each may strike."""
