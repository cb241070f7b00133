"""Rigs: what the faults run on. The same scenarios, with other sizes, run on a GPU, a CPU engine and a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.neighbour import GIB, MIB
from supervisord_vllm.simulation.shared_card import CARD_VARIABLE, TOML_VARIABLE, SharedCard

STANDIN_MODEL = "Qwen/Qwen2.5-7B-Instruct"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Rig:
    """One engine on one device. Sizes are bytes; utilizations are fractions of the whole device.

    ``declared`` is what faults 1 to 3 ask for, ``floor`` how far it may go down; ``serving`` is the utilization of the
    fault that fills the card while serving (``None``: it cannot be made by real means here).
    """

    name: str
    command: Sequence[str]
    model: str
    memory: str
    where: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    levers: Mapping[str, object] = field(default_factory=dict)
    declared: float = 0.90
    floor: float = 0.40
    neighbour: int = 40 * GIB
    serving: float | None = 0.60
    left: int = 96 * MIB
    burst: tuple[int, int] = (24, 7900)
    length: int = 8192
    long_length: int = 131_072
    long_levers: Mapping[str, object] = field(default_factory=dict)
    long_args: Sequence[str] = ()
    tiny: float = 0.10
    crowd: int = 200
    request: tuple[int, int] = (512, 300)
    """Prompt and answer of the crowd's requests, in tokens."""
    long_answer: int = 3000
    by_uuid: bool = False


def gpu(command: Sequence[str], model: str) -> Rig:
    """A real card and a real vLLM, with a 7B model's shape and dummy weights."""
    return Rig(
        name="gpu",
        command=command,
        model=model,
        memory="nvml",
        where="gpu",
        args=("--served-model-name", "m", "--load-format", "dummy"),
        env=OFFLINE,
        levers={"max-num-seqs": 16},
        long_levers={"gpu-memory-utilization": 0.135},
        by_uuid=True,
    )


def cpu(command: Sequence[str], model: str) -> Rig:
    """The CPU build of vLLM in a memory cgroup of 6 GiB, with a tiny model. Only the kernel ends its memory."""
    return Rig(
        name="cpu",
        command=command,
        model=model,
        memory="host",
        where="host",
        args=("--served-model-name", "m", "--dtype", "float32"),
        env={**OFFLINE, "TRANSFORMERS_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        levers={"enforce-eager": True},
        declared=0.70,
        floor=0.30,
        neighbour=2 * GIB,
        serving=None,
        length=512,
        long_length=4096,
        long_args=("--kv-cache-memory-bytes", "1M"),
        tiny=0.01,
    )


def standin(folder: Path) -> Rig:
    """The stand-in engine on a simulated H200, fifty times as fast: for trying the benchmark itself."""
    folder.mkdir(parents=True, exist_ok=True)
    toml, state = folder / "card.toml", folder / "card.json"
    toml.write_text('schema = 1\nbase = "h200"\n[timing]\nspeed = 50\n', encoding="utf-8")
    variables = {CARD_VARIABLE: str(state), TOML_VARIABLE: str(toml)}
    SharedCard.from_environment(variables)  # it is there before any engine: a neighbour may come first
    return Rig(
        name="standin",
        command=(sys.executable, "-m", "supervisord_vllm.simulation", "serve"),
        model=STANDIN_MODEL,
        memory=f"card:{state}",
        where=f"card:{state}",
        args=("--served-model-name", "m"),
        env=variables,
        levers={"max-num-seqs": 16},
        long_levers={"gpu-memory-utilization": 0.135},
        crowd=60,
        long_answer=600,
    )
