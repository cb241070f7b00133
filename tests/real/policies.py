"""Policy files for the real engine: the tiny model, quick patience, folders and ports of a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from real.sandbox import Sandbox
from real.vllm_cpu.install import VllmCpu

# float32: in eager mode bf16 dies of SIGILL on a processor with AMX.
ARGS = ("--served-model-name", "tiny", "--dtype", "float32")
EAGER = {"enforce-eager": True}  # no minute of compiling; not in any ladder
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
ONE_GPU_TREE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""API server and EngineCore, as on one GPU; without it the CPU platform adds a Worker."""


def table(values: Mapping[str, object]) -> str:
    """Keys and values as lines of TOML; JSON's scalars are TOML's."""
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())


def policy(
    sandbox: Sandbox,
    vllm: VllmCpu,
    *,
    levers: Mapping[str, object],
    ladder: Sequence[Mapping[str, object]] = (),
    model: str | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    worker: bool = False,
    fork: bool = True,
    burst: int | None = 2,
) -> str:
    """The text of a policy file.

    ``fork`` starts EngineCore as CUDA does, one import quicker; tests about orphans and ports run without it.
    ``worker`` asks for the process tree of several GPUs. ``burst`` is the number of requests at once of its proof,
    small and short unless a test is about it (``None``: the default).
    """
    variables = {**OFFLINE, **({} if worker else ONE_GPU_TREE), "PYTHONPATH": vllm.faults, **(env or {})}
    if fork:
        variables["VLLMTEST_FORK"] = "1"
    engine_port, http_port = sandbox.ports
    rungs = "\n".join(f"[[ladder]]\n{table(rung)}" for rung in ladder)
    return f"""\
schema = 1
name = "real"
state-dir = {json.dumps(str(sandbox.state_dir))}
runtime-dir = {json.dumps(str(sandbox.runtime_dir))}

[engine]
command = {json.dumps(vllm.command)}
model = {json.dumps(model or vllm.model)}
args = {json.dumps([*ARGS, *args])}
host = "127.0.0.1"
port = {engine_port}

[engine.env]
{table(variables)}

[levers]
{table({**EAGER, **levers})}

{rungs}

[memory]
source = "host"

[gate]
window = "1s"
patience = "5s"
deadline = "180s"

[proof]
{"" if burst is None else f"concurrency = {burst}"}
prompt-tokens = 16
output-tokens = 4
soak = "2s"

[restart]
backoff = {{ first = "1s", factor = 2, max = "5s" }}

[http]
listen = "127.0.0.1:{http_port}"
"""
