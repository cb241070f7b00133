"""The start of an EngineCore: stages in vLLM's order, each takes its memory of the shared card and prints its lines.

Failures are not scripted: they follow from what is free at that moment. Faults of the plan strike on entering a stage.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import time
from typing import Any, NoReturn

from supervisord_vllm.simulation import ledger as account
from supervisord_vllm.simulation import texts
from supervisord_vllm.simulation.console import Console, untagged
from supervisord_vllm.simulation.core_memory import CoreMemory
from supervisord_vllm.simulation.fault import Fault
from supervisord_vllm.simulation.fault_plan import FaultPlan
from supervisord_vllm.simulation.ledger import RESERVED_SLACK, Ledger, Settings
from supervisord_vllm.simulation.link import Link, Message
from supervisord_vllm.simulation.quantity import MIB, gib
from supervisord_vllm.simulation.resolve import print_engine_notes
from supervisord_vllm.simulation.shared_card import CardFullError, SharedCard
from supervisord_vllm.simulation.tracebacks import HEADER, STARTUP, frames

UNKNOWN = "RuntimeError: page table epoch 41 precedes 42 (internal invariant)"
"""The last line of an ``unknown`` fault: an error that nobody has met."""


class StartError(Exception):
    """The start failed: the frames of the traceback and its last lines."""

    def __init__(self, stage: str, *last: str) -> None:
        super().__init__(last[0])
        self.frames = STARTUP[stage]
        self.texts = last


class CoreStart:
    """One start. ``order`` is the API server's first message."""

    def __init__(self, shared: SharedCard, order: Message, console: Console, link: Link) -> None:
        card = shared.card()
        self.shared = shared
        self.console = console
        self.link = link
        self.device = card.device
        self.timing = card.timing
        self.model = card.models[order["model"]]
        self.settings = _settings(order["settings"])
        self.order = order
        self.plan = FaultPlan(shared, os.environ, order["launch"])
        self.ledger: Ledger = account.account(self.device, self.model, self.settings, cold=False)
        self.free_at_start = 0
        self.foreign_at_start = 0
        self.memory = CoreMemory(shared, self.device, self.model)

    def run(self) -> Message:
        """Go through all stages; returns what the API server wants to know. Raises `StartError`."""
        self._pause(self.timing.spawn)
        self._init_device()
        self._load_model()
        compiling = self._profile()
        self._check_cache()
        self._enter("kv-alloc")
        self._allocate_cache()
        self._capture()
        self._summary()
        self._warm_up()
        took = self.timing.profile + compiling
        if not self.settings.eager:
            took += self.timing.warm_up + self.timing.capture
        suffix = "" if self.settings.eager else f" (compilation: {compiling:.2f} s)"
        line = f"init engine (profile, create kv cache, warmup model) took {took:.2f} s{suffix}"
        self.console.info("core.py:347" if self.settings.eager else "core.py:340", line)
        print_engine_notes(self.settings, self.console)
        self.shared.enter("running")
        length = self.settings.max_model_len
        return {
            "max_model_len": length,
            "blocks": self.ledger.blocks,
            "tokens": self.ledger.tokens(length),
            "concurrency": self.ledger.concurrency(length),
        }

    # --- stages -----------------------------------------------------------------------------------------------------

    def _init_device(self) -> None:
        log = self.console.info
        log("core.py:116", f"Initializing a V1 LLM engine (v{texts.VERSION}) with config: {self.config_text()}")
        log(
            "parallel_state.py:1615",
            "world_size=1 rank=0 local_rank=0 distributed_init_method=tcp://127.0.0.1:40383 backend=nccl",
        )
        stamp = time.strftime("%m%d %H:%M:%S")
        message = "The hostname of the client socket cannot be retrieved. err=-3"
        untagged(f"[W{stamp}.335521202 socket.cpp:207] [c10d] {message}")
        log(
            "parallel_state.py:1946",
            "rank 0 in world size 1 is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank 0, EP rank N/A, EPLB "
            "rank N/A",
        )
        log("gpu_worker.py:378", "Using V2 Model Runner")
        try:
            self.free_at_start = self.memory.hold(self.device.context)
        except CardFullError:
            raise StartError("init_device", "torch.AcceleratorError: CUDA error: out of memory") from None
        self.foreign_at_start = self.memory.foreign()
        if self.free_at_start < self.ledger.requested:
            text = texts.free_below_wish(
                self.free_at_start, self.device.usable, self.settings.utilization, self.ledger.requested
            )
            raise StartError("init_device", text)

    def _load_model(self) -> None:
        log = self.console.info
        self._enter("loading")
        log("model_runner.py:284", "Loading model from scratch...")
        backends = "['FLASH_ATTN', 'TRITON_ATTN', 'FLEX_ATTENTION']"
        log("cuda.py:482", f"Using FLASH_ATTN attention backend out of potential backends: {backends}.")
        log("flash_attn.py:776", "Using FlashAttention version 3")
        try:
            self.memory.take(self.model.non_torch)
            for piece in account.weight_pieces(self.model, self.settings.quantization):
                self.memory.take(piece)
        except CardFullError as full:
            raise StartError("loading", self.memory.message(full)) from None
        self._pause(self.timing.weights)
        weights = gib(self.ledger.weights)
        log("model_runner.py:305", f"Model loading took {weights} GiB and {self.timing.weights / 2:.6f} seconds")
        log(
            "topk_topp_sampler.py:39",
            "FlashInfer top-p/top-k sampling disabled via VLLM_USE_FLASHINFER_SAMPLER=0.",
        )

    def _profile(self) -> float:
        """Profile run; returns the seconds of compilation."""
        self._enter("profiling")
        cold, compiling = self._compile()
        settings = self.settings
        self.ledger = account.account(self.device, self.model, settings, cold)
        before = self.memory.own()
        stage = "profiling"
        try:
            for piece in account.forward_pieces(self.model, settings.max_num_batched_tokens, settings.quantization):
                self.memory.take(piece)
            self.memory.hold(before)
            stage = "profiling_sampler"
            self.memory.take(
                account.logits_bytes(self.model, min(settings.max_num_seqs, settings.max_num_batched_tokens))
            )
            self._pause(self.timing.profile)
            self.memory.hold(before)
        except CardFullError as full:
            raise StartError(stage, self.memory.message(full)) from None
        if settings.kv_cache_memory_bytes is not None:
            self.console.info(
                "gpu_worker.py:479",
                f"Initial free memory {gib(self.free_at_start)} GiB, reserved {gib(settings.kv_cache_memory_bytes)} "
                "GiB memory for KV Cache as specified by kv_cache_memory_bytes config and skipped memory profiling. "
                "This does not respect the gpu_memory_utilization config. Only use kv_cache_memory_bytes config when "
                "you want manual control of KV cache memory size. If OOM'ed, check the difference of initial free "
                "memory between the current run and the previous run where kv_cache_memory_bytes is suggested and "
                "update it correspondingly.",
            )
            return compiling
        free = self.shared.free()
        if free > self.free_at_start:
            raise StartError("memory_profiling", texts.profiling_race(self.free_at_start, free))
        growth = max(0, self.memory.foreign() - self.foreign_at_start)
        self.ledger = account.account(self.device, self.model, settings, cold, growth)
        self.console.info("gpu_worker.py:560", f"Available KV cache memory: {gib(self.ledger.kv)} GiB")
        return compiling

    def _compile(self) -> tuple[bool, float]:
        if self.settings.eager:
            return False, 0.0
        key = hashlib.sha256(repr(self._compile_key()).encode()).hexdigest()
        cold = not self.shared.compiled(key)
        took = self.timing.compile_cold if cold else self.timing.compile_warm
        log, cache = self.console.info, "/var/cache/vllm/torch_compile_cache"
        graphs = f"compile range (1, {self.settings.max_num_batched_tokens})"
        aot = f"{cache}/torch_aot_compile/{key}/rank_0_0/model"
        log("backends.py:1094", f"Using cache directory: {cache}/{key[:10]}/rank_0_0/backbone for vLLM's torch.compile")
        log("backends.py:1155", f"Dynamo bytecode transform time: {took * 0.33:.2f} s")
        self._pause(took)
        if cold:
            log("backends.py:378", f"Cache the graph of {graphs} for later use")
            log("backends.py:393", f"Compiling a graph for {graphs} takes {took * 0.48:.2f} s")
            log("decorators.py:708", f"saved AOT compiled function to {aot}")
        else:
            load = f"Directly load the compiled graph(s) for {graphs} from the cache, took {took * 0.31:.3f} s"
            log("backends.py:292", load)
            log("decorators.py:311", f"Directly load AOT compilation from path {aot}")
        log("monitor.py:53", f"torch.compile took {took:.2f} s in total")
        log("monitor.py:81", f"Initial profiling/warmup run took {0.44 if cold else 0.09} s")
        self.shared.remember_compiled(key)
        return cold, took

    def _check_cache(self) -> None:
        ledger, log = self.ledger, self.console.info
        if ledger.kv <= 0:
            raise StartError("no_blocks", texts.NO_BLOCKS)
        if self.settings.auto_len:
            self._fit_length()
        length = self.settings.max_model_len
        needed = ledger.needed(length)
        if needed > ledger.kv:
            raise StartError("too_long", texts.too_long(length, needed, ledger.kv, ledger.estimated_max_len()))
        log("kv_cache_utils.py:2177", f"GPU KV cache size: {ledger.tokens(length):,} tokens")
        concurrency = f"{ledger.concurrency(length):.2f}x"
        log("kv_cache_utils.py:2178", f"Maximum concurrency for {length:,} tokens per request: {concurrency}")

    def _fit_length(self) -> None:
        longest, derived = self.ledger.estimated_max_len(), self.settings.max_model_len
        if longest < 1:
            raise StartError("no_blocks", texts.CANNOT_FIT_AUTO)
        room = gib(self.ledger.kv)
        if longest < derived:
            self.settings = dataclasses.replace(self.settings, max_model_len=longest)
            text = (
                f"Auto-fit max_model_len: reduced from {derived} to {longest} to fit in available GPU memory "
                f"({room} GiB available for KV cache)"
            )
        else:
            text = (
                f"Auto-fit max_model_len: full model context length {derived} fits in available GPU memory "
                f"({room} GiB available for KV cache)"
            )
        self.console.info("kv_cache_utils.py:1985", text)

    def _allocate_cache(self) -> None:
        layers = self.model.layers
        whole = self.ledger.blocks * self.ledger.block_bytes
        try:
            self.memory.take(self.ledger.sequence_state + RESERVED_SLACK)
            for _ in range(layers):
                self.memory.take(whole // layers)
        except CardFullError as full:
            raise StartError("kv-alloc", self.memory.message(full)) from None

    def _capture(self) -> None:
        log = self.console.info
        log("ll_bf16.py:30", "cuteDSL (CUTLASS Python) not available, ll_bf16_gemm disabled")
        log("cutedsl_warmup.py:101", "Skipping CuTeDSL warmup because no compile units were requested.")
        if self.settings.eager:
            return
        self._enter("capture")
        before = self.shared.free()
        piecewise, full = account.capture_counts(self.settings)
        try:
            self.memory.take(self.ledger.graphs)
        except CardFullError as short:
            raise StartError("capture", self.memory.message(short)) from None
        self._pause(self.timing.capture)
        self.console.progress("Capturing CUDA graphs (PIECEWISE)", piecewise, 21.88)
        if full:
            self.console.progress("Capturing CUDA graphs (FULL)", full, 34.59)
        # Device-wide difference of free memory: a neighbour that moves meanwhile is counted.
        self.memory.graphs = max(0, before - self.shared.free())
        seconds = max(1, round(self.timing.capture))
        log("model_runner.py:747", f"Graph capturing finished in {seconds} secs, took {gib(self.memory.graphs)} GiB")

    def _summary(self) -> None:
        if self.settings.kv_cache_memory_bytes is not None:
            return
        ledger = dataclasses.replace(self.ledger, graphs=self.memory.graphs)
        fit, full = account.suggestions(ledger, self.free_at_start)
        self.console.info(
            "gpu_worker.py:857",
            f"Free memory on device ({gib(self.free_at_start)}/{gib(ledger.total)} GiB) on startup. Desired GPU memory "
            f"utilization is ({self.settings.utilization}, {gib(ledger.requested)} GiB). Actual usage is "
            f"{gib(ledger.weights)} GiB for weight, {gib(ledger.activation)} GiB for peak activation, "
            f"{gib(ledger.non_torch)} GiB for non-torch memory, and {gib(ledger.graphs)} GiB for CUDAGraph memory. "
            f"Replace gpu_memory_utilization config with `--kv-cache-memory={fit}` ({gib(fit)} GiB) to fit into "
            f"requested memory, or `--kv-cache-memory={full}` ({gib(full)} GiB) to fully utilize gpu memory. Current "
            f"kv cache memory in use is {gib(ledger.kv)} GiB.",
        )

    def _warm_up(self) -> None:
        self._enter("warm-up")
        try:
            self.memory.take(account.warm_up_bytes(self.model, self.settings.max_num_seqs))
        except CardFullError as full:
            raise StartError("warm-up", *self._sampler_error(full)) from None
        if not self.settings.eager:
            self._pause(self.timing.warm_up)
        self.console.info(
            "jit_monitor.py:79",
            "Kernel JIT monitor activated; monitored JIT compilations during inference will use mode=warn.",
        )

    # --- faults -----------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        """Let a fault happen that does not end in a message: neighbours, hang, death, silent exit."""
        if fault.kind in ("neighbour-takes", "await-neighbour"):
            self.plan.neighbour(fault)
        elif fault.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "exit":
            self.link.send({"type": "exit", "code": fault.code})
            self._hang()
        elif fault.kind == "hang":
            self._hang()

    def config_text(self) -> str:
        """The resolved configuration on one line."""
        order = self.order
        return texts.config_line(
            order["name"], order["served"], order["load_format"], self.settings, order["prefix_caching"]
        )

    def _sampler_error(self, full: CardFullError) -> tuple[str, ...]:
        return (
            self.memory.message(full),
            "",
            "The above exception was the direct cause of the following exception:",
            "",
            HEADER,
            *frames(STARTUP["warm-up"].rstrip().rpartition("\n")[0]),
            texts.sampler_warm_up(self.settings.max_num_seqs),
        )

    def _enter(self, stage: str) -> None:
        self.shared.enter(stage)
        for fault in self.plan.at(stage):
            if fault.kind == "oom":
                self._starve_at(stage, fault)
            if fault.kind == "unknown":
                raise StartError(stage, UNKNOWN)
            self.strike(fault)

    def _starve_at(self, stage: str, fault: Fault) -> NoReturn:
        model, settings = self.model, self.settings
        usual = {
            "loading": max(account.layer_pieces(model, settings.quantization)),
            "profiling": max(account.forward_pieces(model, settings.max_num_batched_tokens, settings.quantization)),
            "kv-alloc": max(MIB, self.ledger.kv // model.layers),
            "capture": 32 * MIB,
            "warm-up": account.logits_bytes(model, settings.max_num_seqs),
        }
        full = self.memory.starve(fault.bytes or usual[stage])
        last = self._sampler_error(full) if stage == "warm-up" else (self.memory.message(full),)
        raise StartError(stage, *last)

    def _hang(self) -> None:
        while self.shared.exists:
            time.sleep(0.2)

    # --- memory and time --------------------------------------------------------------------------------------------

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds * self.plan.slowness / self.timing.speed)

    def _compile_key(self) -> tuple[object, ...]:
        """What makes torch.compile start anew in 0.26; utilization, KV bytes and eager are not in it."""
        s = self.settings
        return (
            self.model.name,
            s.max_num_batched_tokens,
            s.max_num_seqs,
            s.max_model_len,
            s.quantization,
            s.kv_cache_dtype,
        )


def _settings(data: dict[str, Any]) -> Settings:
    return Settings(**{**data, "capture_sizes": tuple(data["capture_sizes"])})
