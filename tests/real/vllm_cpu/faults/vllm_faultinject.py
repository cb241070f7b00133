"""A vLLM plugin for tests: real faults inside the real engine. It does nothing unless a VLLMTEST_* variable is set.

This folder on PYTHONPATH is enough: vLLM finds the entry point and calls `register` in the API server, EngineCore and
Worker. The class of an error, its way through vLLM and what the engine does next are vLLM's own; only the text of the
out-of-memory message is ours, in CUDA's form.

VLLMTEST_FORK=1            start EngineCore by fork (CUDA's default), not the CPU platform's spawn: one import less
VLLMTEST_FAULT=KIND[:N]    oom_load, oom_kv, or from step N on: oom_step, err_step, exit_step, segv_step, kill_step,
                           ill_step, hang_step; leak_step leaks N MiB in every step; oom_at_once and err_at_once
                           strike in a step with N requests in it
VLLMTEST_FAULT_ONCE=FILE   the fault fires only if FILE does not exist, and creates it: a restart is healthy
VLLMTEST_FAULT_WHILE=FILE  the fault fires only while FILE exists
VLLMTEST_STEP_MS=MS        every step takes at least this long, so that a stream can be interrupted
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from functools import cache, wraps
from pathlib import Path
from typing import Any

PAGE = 4096


def out_of_memory(mib: float) -> str:
    """CUDA's message for a full H200."""
    return (
        f"CUDA out of memory. Tried to allocate {mib:.2f} MiB. GPU 0 has a total capacity of 139.80 GiB of which "
        "1.56 MiB is free. Including non-PyTorch memory, this process has 139.79 GiB memory in use. Of the allocated "
        "memory 138.02 GiB is allocated by PyTorch, and 1.11 GiB is reserved by PyTorch but unallocated. If reserved "
        "but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation."
    )


def armed() -> bool:
    """Whether the fault may fire now; under VLLMTEST_FAULT_ONCE the first asker in any process gets a yes."""
    during = os.environ.get("VLLMTEST_FAULT_WHILE")
    if during and not Path(during).exists():
        return False
    once = os.environ.get("VLLMTEST_FAULT_ONCE")
    if not once:
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def use_fork() -> None:
    """Undo the CPU platform's choice of spawn, which it makes when the configuration is checked."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, config: Any) -> None:
        original(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def fail_at(owner: type, method: str, mib: float) -> None:
    """Make one method of the model runner run out of memory."""
    import torch

    original = getattr(owner, method)

    @wraps(original)
    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if armed():
            raise torch.OutOfMemoryError(out_of_memory(mib))
        return original(self, *args, **kwargs)

    setattr(owner, method, failing)


def strike(kind: str) -> None:
    """The fault of one step."""
    import torch

    if kind in ("oom_step", "oom_at_once"):
        raise torch.OutOfMemoryError(out_of_memory(20))
    if kind in ("err_step", "err_at_once"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if kind == "exit_step":
        os._exit(7)
    if kind == "segv_step":
        ctypes.string_at(0)
    if kind == "kill_step":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "ill_step":
        os.kill(os.getpid(), signal.SIGILL)
    if kind == "hang_step":
        time.sleep(10**6)


def due(kind: str, steps: int, requests: int) -> int:
    """What the number of a fault is compared with: steps so far, or requests in this step; -1: nothing."""
    return steps if kind.endswith("_step") else requests if kind.endswith("_at_once") else -1


def change_steps(runner: type, kind: str, number: int, least_seconds: float) -> None:
    """Slow every step down, leak in every step, or strike from a step on. Steps without tokens do not count."""
    original = runner.execute_model
    leaked: list[bytearray] = []
    steps = 0

    @wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        if scheduler_output.total_num_scheduled_tokens > 0:
            steps += 1
            time.sleep(least_seconds)
            if kind == "leak_step":
                block = bytearray(number << 20)
                block[::PAGE] = b"x" * len(block[::PAGE])
                leaked.append(block)
            elif number <= due(kind, steps, len(scheduler_output.num_scheduled_tokens)) and armed():
                strike(kind)
        return original(self, scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model


@cache
def register() -> None:
    """vLLM's entry point; it may be called more than once in a process."""
    if os.environ.get("VLLMTEST_FORK") == "1":
        use_fork()
    kind, _, number = os.environ.get("VLLMTEST_FAULT", "").partition(":")
    least_seconds = float(os.environ.get("VLLMTEST_STEP_MS", "0")) / 1000
    if not kind and not least_seconds:
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if kind == "oom_load":
        fail_at(CPUModelRunner, "load_model", 1184)
    elif kind == "oom_kv":
        fail_at(CPUModelRunner, "initialize_kv_cache", 2368)
    if least_seconds or kind.endswith(("_step", "_at_once")):
        change_steps(CPUModelRunner, kind, int(number or 0), least_seconds)
