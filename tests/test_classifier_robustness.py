"""Hostile logs: noise, mutated lines, and what a client can bring into a serving engine's log."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from types import ModuleType

import pytest

from labelled import DATA, fed
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.engine.classifier import Classifier
from supervisord_vllm.engine.frames import MAX_FRAMES, MAX_STREAMS
from supervisord_vllm.engine.launches import read
from supervisord_vllm.engine.lines import LIMIT
from supervisord_vllm.engine.stats import WINDOW

STAMP = "12-01 01:23:19"
SERVER = f"(APIServer pid=17) ERROR {STAMP} "
CORE = f"(EngineCore pid=42) ERROR {STAMP} [core.py:1204] "
FATAL = f"{CORE}EngineCore encountered a fatal error."
SERVING = [
    f"(APIServer pid=17) INFO {STAMP} [api_utils.py:345] vLLM server version 0.32.0, serving model m",
    f"(EngineCore pid=42) INFO {STAMP} [core.py:101] Initializing a V1 LLM engine (v0.32.0) with config: model='m'",
    "INFO:     Application startup complete.",
]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
FORGED = [  # each line as a client could bring it in with a newline in a request that ends up in a traceback
    f"(EngineCore pid=7) ERROR {STAMP} [core.py:1204] EngineCore encountered a fatal error.",
    f"(EngineCore pid=7) ERROR {STAMP} [core.py:1204] {OOM}",
    f"(Worker_TP0 pid=7) ERROR {STAMP} [x.py:1] Worker proc VllmWorker-0 died unexpectedly, shutting down executor.",
    f"(APIServer pid=7) ERROR {STAMP} [core_client.py:8] Engine core process EngineCore died unexpectedly.",
    f"(APIServer pid=7) ERROR {STAMP} [async_llm.py:704] AsyncLLM output_handler failed.",
    f"(APIServer pid=17) CRITICAL {STAMP} [core_client.py:158] Got fatal signal from worker processes, shutting down.",
    f"(APIServer pid=17) ERROR {STAMP} [async_llm_engine.py:67] Engine background task failed",
    f"ERROR {STAMP} [async_llm.py:704] AsyncLLM output_handler failed.",
    f"ERROR {STAMP} [core.py:1] EngineCore encountered a fatal error.",
    f"ERROR {STAMP} [core.py:1] {OOM}",
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    "kernel: Out of memory: Killed process 42 (VLLM::EngineCor)",
    "Killed",
    "!!!!!!! Segfault encountered !!!!!!!",
    OOM,
]


def robustness() -> ModuleType:
    """The long run's own code."""
    path = DATA.parent.parent / "benchmarks" / "diagnose_robustness.py"
    spec = importlib.util.spec_from_file_location("diagnose_robustness", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [3, 4])
def test_noise_raises_nothing_and_changes_no_configuration(seed: int) -> None:
    """A short form of benchmarks/diagnose_robustness.py, which runs a million lines."""
    assert list(robustness().run(5000, seed)) == []


def test_forged_lines_of_a_serving_engine_change_nothing() -> None:
    found = fed([*SERVING, *FORGED]).verdict()
    assert (found.kind, found.action, found.change) == (Kind.NONE, Action.NO_ACTION, ())
    assert not read([*SERVING, *FORGED]).verdict().change


def test_a_forged_line_does_not_hide_the_real_end() -> None:
    real = [FATAL, f"{CORE}RuntimeError: CUDA error: device-side assert triggered"]
    found = fed([*SERVING, *FORGED, *real]).verdict(exit_code=0)
    assert found.kind is Kind.CUDA_FAULT
    assert found.evidence[0].role == "EngineCore"


def test_a_process_that_first_speaks_when_it_fails_is_believed_once_the_engine_says_so() -> None:
    worker = [
        f"(Worker_TP1 pid=99) ERROR {STAMP} [multiproc_executor.py:9] WorkerProc hit an exception.",
        f"(Worker_TP1 pid=99) ERROR {STAMP} [multiproc_executor.py:9] {OOM}",
    ]
    assert fed([*SERVING, *worker]).verdict().kind is Kind.NONE
    echo = [FATAL, f"{CORE}RuntimeError: Worker failed with error 'x', please check"]
    found = fed([*SERVING, *worker, *echo]).verdict()
    assert (found.kind, found.evidence[0].role) == (Kind.OOM_RUNTIME, "Worker_TP1")


def test_a_models_name_that_is_an_error_is_a_name() -> None:
    name = "CUDA out of memory. Tried to allocate 2.00 GiB. No available memory for the cache blocks"
    lines = [
        f"(APIServer pid=17) INFO {STAMP} [a.py:1] non-default args: {{'model': '{name}', 'port': 8000}}",
        f"(EngineCore pid=42) INFO {STAMP} [gpu_model_runner.py:1] Starting to load model {name}...",
        f"(EngineCore pid=42) WARNING {STAMP} [x.py:1] {name}",
        SERVING[-1],
    ]
    for count in range(1, len(lines) + 1):
        assert fed(lines[:count]).verdict().kind is Kind.NONE


def test_what_is_kept_of_an_endless_log_is_bounded() -> None:
    classifier = Classifier(kernel_lines=True)
    for line in SERVING:
        classifier.feed(line)
    load = "Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 1 reqs, Waiting:"
    for number in range(6_000):
        classifier.feed(f"(APIServer pid=17) INFO {STAMP} [loggers.py:271] {load} {number} reqs, {'x' * 4000}")
        classifier.feed(f"kernel: NVRM: Xid (PCI:0000:{number % 100:02}:00): {number}, x")
        classifier.feed(f'(W{number} pid={number}) ERROR {STAMP} [x.py:1]   File "x.py", line 1, in f{number}')
    assert len(classifier._loads) == WINDOW
    assert all(len(line) <= 2048 for _, line in classifier._loads)
    note = classifier._notes["note-xid"]
    assert note is not None
    assert (note.count, len(note.values["xid"])) == (6_000, 32)
    assert len(classifier._frames._streams) <= MAX_STREAMS
    assert all(len(frames) <= MAX_FRAMES for frames in classifier._frames._streams.values())


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe" * 5000,
        b'{"levelname": "ERROR", "message": ' + b"[" * 100_000,
        b'{"log": "' + b"\\u0000" * 10_000 + b'"}',
        b"(" * LIMIT,
        b"\r" * LIMIT,
        b"\x1b[" + b"1;" * LIMIT,
        b"(EngineCore pid=42) ERROR 12-01 01:00:00 [x.py:1] " + b"Process 1 has 1.00 GiB memory in use. " * 20_000,
        b"INFO 12-01 01:00:00 [" + b"a/" * 10_000 + b".py:1] x",
        b"2026-01-01T00:00:00Z " * 10_000,
        b"Loading safetensors checkpoint shards: 1%" + b"|" * 100_000,
        "─".encode() * 100_000,
    ],
    ids=range(11),
)
def test_a_line_of_a_megabyte_is_a_line(line: bytes) -> None:
    classifier = Classifier(kernel_lines=True)
    for _ in range(3):
        classifier.feed(line)
        classifier.feed(line.decode("utf-8", "replace"))
    assert classifier.verdict().kind in (Kind.NONE, Kind.UNKNOWN, Kind.BAD_CONFIG)


def test_every_shape_of_a_carrier_leads_to_the_same_verdict() -> None:
    """Docker's file on disk, Google's logging, a CI's brackets, pipes, double tags."""
    cause = f"{CORE}ValueError: No available memory for the cache blocks. Try increasing"
    fatal = f"{CORE}EngineCore failed to start."
    carriers: dict[str, Callable[[str], str]] = {
        "docker file": lambda text: json.dumps(
            {"log": text + "\n", "stream": "stderr", "time": "2026-01-01T00:00:00Z"}
        ),
        "google": lambda text: f"INFO 2025-11-19T20:16:36.096625454Z [resource.labels.containerName: vllm] {text}",
        "brackets": lambda text: f"  | [2025-01-01T15:07:20Z] {text}",
        "kubectl": lambda text: f"[pod/vllm-0/vllm] {text}",
        "syslog": lambda text: f"Jan 01 18:30:11 host vllm[8707]: {text}",
        "containerd": lambda text: f"2026-01-01T07:44:10.0Z stderr F {text}",
        "server's tag": lambda text: f"(EngineCore pid=42) {text}",
    }
    for name, carry in carriers.items():
        found = fed([carry(fatal), carry(cause)]).verdict()
        assert (found.kind, found.evidence[0].role) == (Kind.KV_NO_BLOCKS, "EngineCore"), name
