"""NVML's word against CUDA's and nvidia-smi's: what `host/nvml.py` samples, beside what a CUDA process sees.

``python -m benchmarks.gpu.truth SECONDS`` is that CUDA process (torch): it prints what ``torch.cuda.mem_get_info`` says
before and after it takes memory, and then works the card for so long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.gpu.neighbour import GIB, MIB, Neighbour
from supervisord_vllm.host.memory import MemorySource, MemoryUnavailable, open_source

Json = dict[str, Any]
HELD = 10 * GIB
SAMPLES = 200


def sampled(source: MemorySource, own: frozenset[int] = frozenset()) -> Json:
    """One sample of the first device, as plain values."""
    device = source.sample(own)[0]
    return {
        "device": device.device,
        "total_bytes": device.total_bytes,
        "free_bytes": device.free_bytes,
        "own_bytes": device.own_bytes,
        "foreign_bytes": device.foreign_bytes,
        "holders": [{"pid": h.pid, "bytes": h.memory_bytes, "command": h.command} for h in device.holders],
    }


def nvidia_smi() -> Json | None:
    """What nvidia-smi says: sizes in MiB and what every process uses; ``None`` where there is none."""
    whole = _smi("--query-gpu=name,driver_version,uuid,memory.total,memory.reserved,memory.used,memory.free")
    if whole is None:
        return None
    name, driver, uuid, *sizes = whole[0]
    apps = _smi("--query-compute-apps=pid,used_memory") or []
    return {
        "name": name,
        "driver": driver,
        "uuid": uuid,
        **dict(zip(("total_mib", "reserved_mib", "used_mib", "free_mib"), map(_number, sizes), strict=True)),
        "processes": {pid: _number(used) for pid, used in apps},
    }


def _smi(query: str) -> list[list[str]] | None:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [[field.strip() for field in line.split(",")] for line in ran.stdout.splitlines() if line.strip()]


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def cost(source: MemorySource, own: frozenset[int] = frozenset(), count: int = SAMPLES) -> Json:
    """Milliseconds of one sample."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        source.sample(own)
        took.append((time.perf_counter() - began) * 1000)
    took.sort()
    return {
        "samples": count,
        "median_ms": round(median(took), 3),
        "p95_ms": round(took[int(0.95 * (count - 1))], 3),
        "max_ms": round(took[-1], 3),
    }


def visible(value: str, uuid: str) -> str:
    """What the sampler makes of a value of CUDA_VISIBLE_DEVICES: ``the card``, ``another``, or why nothing."""
    try:
        source = open_source("nvml", {"CUDA_VISIBLE_DEVICES": value})
        return "the card" if source.sample(frozenset())[0].device == uuid else "another"
    except MemoryUnavailable as unavailable:
        return str(unavailable)


def beside_cuda(environ: Mapping[str, str]) -> Json:
    """The whole comparison on a GPU: idle, a context, memory held and worked on, a neighbour, names of the card."""
    source = open_source("nvml", environ)
    found: Json = {"idle": {"sampler": sampled(source), "nvidia_smi": nvidia_smi(), "cost": cost(source)}}
    uuid = str(found["idle"]["sampler"]["device"])
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    command = [sys.executable, "-m", "benchmarks.gpu.truth", "6"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as cuda:
        assert cuda.stdin is not None
        assert cuda.stdout is not None
        own = frozenset({cuda.pid})
        for moment in ("context", "held"):
            said = json.loads(cuda.stdout.readline())
            found[moment] = {"torch": said, "sampler": sampled(source, own), "nvidia_smi": nvidia_smi()}
            cuda.stdin.write("\n")
            cuda.stdin.flush()
        json.loads(cuda.stdout.readline())  # it works the card now
        with Neighbour("gpu") as neighbour:
            neighbour.hold(5 * GIB)
            found["worked on, beside a neighbour"] = {
                "neighbour_pid": neighbour.pid,
                "cuda_pid": cuda.pid,
                "sampler": sampled(source, own),
                "nvidia_smi": nvidia_smi(),
                "cost": cost(source, own),
            }
        cuda.stdin.close()
    found["given back"] = {"sampler": sampled(source)}
    names = {"by UUID": uuid, "a beginning of it": uuid[:12], "by index": "0", "nothing": "", "no such": "GPU-ffffffff"}
    found["CUDA_VISIBLE_DEVICES"] = {name: visible(value, uuid) for name, value in names.items()}
    found["context_mib"] = round(
        (found["idle"]["sampler"]["free_bytes"] - found["context"]["torch"]["free_bytes"]) / MIB
    )
    return found


def beside_engine(source: MemorySource, own: Sequence[int]) -> Json:
    """The sampler and nvidia-smi at one moment of a running engine."""
    return {"sampler": sampled(source, frozenset(own)), "nvidia_smi": nvidia_smi(), "own_pids": sorted(own)}


def main() -> None:
    """The CUDA process."""
    import torch

    def say(**values: object) -> None:
        free, total = torch.cuda.mem_get_info()
        print(json.dumps({"free_bytes": free, "total_bytes": total, **values}), flush=True)
        sys.stdin.readline()

    torch.cuda.init()
    say(devices=torch.cuda.device_count())
    held = torch.empty(HELD, dtype=torch.uint8, device="cuda")
    say(held_bytes=held.numel(), reserved_bytes=torch.cuda.memory_reserved())
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    print("{}", flush=True)
    until = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until:
        for _ in range(20):
            matrix @ matrix  # for the card to be busy
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
