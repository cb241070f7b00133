"""The stand-in's EngineCore: a process of its own that takes the card's memory stage by stage, then serves steps.

``python -m supervisord_vllm.simulation.engine_core FD``: the first message over the link says what to run. It prints
what vLLM 0.26 prints, fails where the memory is not there, and watches nothing upward: when the API server is killed
it stays and keeps its memory, until it is ended or the card's state file is taken away.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from types import FrameType

from supervisord_vllm.simulation import texts
from supervisord_vllm.simulation.console import Console, untagged
from supervisord_vllm.simulation.core_memory import TITLE
from supervisord_vllm.simulation.core_start import UNKNOWN, CoreStart, StartError
from supervisord_vllm.simulation.fault import Fault
from supervisord_vllm.simulation.ledger import forward_pieces
from supervisord_vllm.simulation.link import Link, Message
from supervisord_vllm.simulation.process_title import set_process_title
from supervisord_vllm.simulation.quantity import MIB
from supervisord_vllm.simulation.scheduler import Request, Scheduler, Step
from supervisord_vllm.simulation.shared_card import CardFullError, SharedCard
from supervisord_vllm.simulation.tracebacks import HEADER, PROCESS, RUNNING, frames

RUNTIME_TRIED = 110 * MIB
"""What an ``oom`` fault tries to allocate in a step (capture 08)."""


def main() -> None:
    """Run the process."""
    set_process_title(TITLE)
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    order = link.first()
    if order is None:
        return
    console = Console("EngineCore")

    def end(_number: int, _frame: FrameType | None) -> None:
        console.info("core.py:1313", "[shutdown] EngineCore: trigger received signal=SIGTERM")
        console.info("core.py:1432", "[shutdown] EngineCore: start mode=abort timeout=0s")
        console.info("core.py:1463", "[shutdown] EngineCore: request processing complete; starting resource teardown")
        console.info("core.py:1326", "[shutdown] EngineCore: exiting busy loop")
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = CoreStart(SharedCard(order["card"]), order, console, link)
    try:
        ready = start.run()
    except StartError as failure:
        print_failure(console, "core.py:1330", "EngineCore failed to start.", frames(failure.frames), failure.texts)
        sys.stdout.flush()
        os._exit(1)
    link.send({"type": "ready", **ready})
    EngineLoop(start, console, link).run()


def print_failure(console: Console, source: str, title: str, trace: list[str], last: tuple[str, ...]) -> None:
    """Title, traceback and exception, first as a log record, then bare as multiprocessing prints it once more."""
    console.error(source, title, HEADER, *trace, *last)
    console.bare(("Process EngineCore:", HEADER, *frames(PROCESS), *trace, *last))
    untagged(
        f"[rank0]:[W{time.strftime('%m%d %H:%M:%S')}.000000000 ProcessGroupNCCL.cpp:1575] Warning: WARNING: "
        "destroy_process_group() was not called before program exit, which can leak resources. For more info, please "
        "see https://pytorch.org/docs/stable/distributed.html#shutdown (function operator())"
    )


class EngineLoop:
    """The busy loop of a started engine."""

    def __init__(self, start: CoreStart, console: Console, link: Link) -> None:
        self.start = start
        self.console = console
        self.link = link
        settings = start.settings
        self.scheduler = Scheduler(start.ledger.blocks, settings.max_num_seqs, settings.max_num_batched_tokens)
        self.pending = list(start.plan.at("running"))
        self.since = time.monotonic()
        self.pool = 0

    def run(self) -> None:
        """Serve for ever."""
        while self.start.shared.exists:
            self._listen()
            for fault in [f for f in self.pending if self._due(f)]:
                self.pending.remove(fault)
                self._strike(fault)
            if self.scheduler.busy:
                self._step()

    def _listen(self) -> None:
        if not self.link.open:
            self.scheduler.waiting.clear()
            self.scheduler.running.clear()
            time.sleep(0.2)
            return
        waits = [0.25, *(f.after - (time.monotonic() - self.since) for f in self.pending if f.after is not None)]
        timeout = 0.0 if self.scheduler.busy else max(0.0, min(waits))
        if select.select([self.link], [], [], timeout)[0]:
            for message in self.link.arrived():
                if message["type"] == "add":
                    self.scheduler.add(Request(message["id"], message["prompt"], message["max_tokens"]))
                else:
                    self.scheduler.abort(message["id"])
                    self._send(Step())

    def _due(self, fault: Fault) -> bool:
        if fault.after is not None:
            return time.monotonic() - self.since >= fault.after
        if fault.at_once is not None:
            return len(self.scheduler.running) + len(self.scheduler.waiting) >= fault.at_once
        # A request is counted when it is about to be admitted, so that the fault strikes while it is in flight.
        soon = min(len(self.scheduler.waiting), max(0, self.scheduler.max_seqs - len(self.scheduler.running)))
        return self.scheduler.admitted + soon >= fault.after_requests

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "oom":
            self.scheduler.step()
            tried = fault.bytes or RUNTIME_TRIED
            self._fatal(self.start.memory.message(self.start.memory.starve(tried)))
        elif fault.kind == "unknown":
            self.scheduler.step()
            self._fatal(UNKNOWN)
        else:
            self.start.strike(fault)

    def _step(self) -> None:
        step = self.scheduler.step()
        try:
            self._compute(step)
        except CardFullError as full:
            self._fatal(self.start.memory.message(full))
        timing = self.start.timing
        served = len(step.advanced) * timing.sequence
        time.sleep(timing.token + served + timing.prefill * step.prompt_tokens / 1000)
        self._send(step)

    def _compute(self, step: Step) -> None:
        """Take what the forward pass needs and keep it, as torch's caching allocator does."""
        needed = 0
        for piece in forward_pieces(self.start.model, step.tokens, self.start.settings.quantization):
            needed += piece
            if needed > self.pool:
                self.start.memory.take(min(piece, needed - self.pool))
                self.pool = needed

    def _send(self, step: Step) -> None:
        scheduler = self.scheduler
        message: Message = {
            "type": "step",
            "admitted": step.admitted,
            "advanced": step.advanced,
            "finished": step.finished,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_usage": scheduler.usage,
            "preemptions": scheduler.preemptions,
            "prompt_tokens": step.prompt_tokens,
            "tokens": step.tokens,
        }
        self.link.send(message)

    def _fatal(self, error: str) -> None:
        scheduler, settings = self.scheduler, self.start.settings
        first = next(iter(scheduler.running), None)
        scheduled = min(settings.max_num_batched_tokens, sum(request.length for request in scheduler.running))
        request = "" if first is None else f"NewRequestData(req_id={first.id},prompt_token_ids_len={first.prompt})"
        self.console.error(
            "dump_input.py:72",
            f"Dumping input data for V1 LLM engine (v{texts.VERSION}) with config: {self.start.config_text()}, ",
        )
        self.console.error(
            "dump_input.py:79",
            f"Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[{request}], "
            f"total_num_scheduled_tokens={scheduled})",
        )
        self.console.error(
            "dump_input.py:81",
            f"Dumping scheduler stats: SchedulerStats(num_running_reqs={len(scheduler.running)}, "
            f"num_waiting_reqs={len(scheduler.waiting)}, num_skipped_waiting_reqs=0, step_counter=0, current_wave=0, "
            f"kv_cache_usage={scheduler.usage}, iteration_details=None)",
        )
        title = "EngineCore encountered a fatal error."
        print_failure(self.console, "core.py:1332", title, frames(RUNNING), (error,))
        os._exit(1)


if __name__ == "__main__":
    main()
