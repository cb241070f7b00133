"""What stands beside the text changes the verdict: the table of rules, row by row, and what must not move it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from labelled import CAPTURES, fed, raw_lines
from supervisord_vllm.core.diagnosis import Action, Change, Diagnosis, Kind
from supervisord_vllm.core.facts import ProcessRef
from supervisord_vllm.engine.circumstance import RULES, Outside
from supervisord_vllm.engine.classifier import Classifier
from supervisord_vllm.engine.launches import read

STAMP = "12-01 01:23:19"
CORE = f"(EngineCore pid=2) ERROR {STAMP} [core.py:1330] "
START = [
    f"(APIServer pid=1) INFO {STAMP} [a.py:273] non-default args: {{'model': 'm', 'gpu_memory_utilization': 0.9}}",
    f"(EngineCore pid=2) INFO {STAMP} [core.py:101] Initializing a V1 LLM engine (v0.32.0) with config: model='m'",
]
LOADING = [*START, f"(EngineCore pid=2) INFO {STAMP} [gpu_model_runner.py:1] Starting to load model m..."]
SERVING = [*LOADING, "INFO:     Application startup complete."]
DEAD = [
    "(APIServer pid=1) INFO 12-01 01:23:20 [core_client.py:1] [shutdown] MPClient: engine core exited unexpectedly; x"
]
FAULT = [
    f"{CORE}EngineCore encountered a fatal error.",
    f"{CORE}RuntimeError: CUDA error: an illegal memory access was encountered",
]
LOAD = (
    "(APIServer pid=1) INFO {stamp} [loggers.py:271] Engine 000: Avg prompt throughput: {tps} tokens/s, Avg generation "
    "throughput: {tps} tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 8.2%, Prefix "
    "cache hit rate: 0.0%"
)
WAITS = (
    "(EngineCore pid=2) INFO 12-01 01:2{n}:00 [shm_broadcast.py:681] No available shared memory broadcast block found "
    "in 60 seconds. This"
)
SHARDS = "Loading safetensors checkpoint shards:  {p}% Completed | {n}/40 [01:58<14:01,  5.89s/it]"


def busy(free: float, total: float, util: float) -> list[str]:
    text = f"Free memory on device cuda:0 ({free}/{total} GiB) on startup is less than desired GPU memory utilization"
    return [*START, f"{CORE}EngineCore failed to start.", f"{CORE}ValueError: {text} ({util}, {util * total:.2f} GiB)."]


def no_blocks(available: float, weights: float = 14.3) -> list[str]:
    return [
        *LOADING,
        f"(EngineCore pid=2) INFO {STAMP} [x.py:1] Model loading took {weights} GiB memory and 3.0 seconds",
        f"(EngineCore pid=2) INFO {STAMP} [x.py:1] Available KV cache memory: {available} GiB",
        f"{CORE}EngineCore failed to start.",
        f"{CORE}ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    ]


def out_of_memory(before: list[str], *frames: str) -> list[str]:
    marker = "encountered a fatal error." if before is SERVING else "failed to start."
    lines = [*before, f"{CORE}EngineCore {marker}", f"{CORE}Traceback (most recent call last):"]
    lines += [f'{CORE}  File "/x/vllm/v1/worker/gpu_worker.py", line 1, in {frame}' for frame in frames]
    oom = "Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 79.20 GiB of which 100.00 MiB is free."
    return [*lines, f"{CORE}torch.OutOfMemoryError: CUDA out of memory. {oom}"]


KILL = "kernel: Out of memory: Killed process 2 (VLLM::EngineCor) total-vm:1kB, anon-rss:1kB"
UVM = "kernel: NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned"


def xid(number: int, bus: str = "0000:48:00") -> str:
    return f"kernel: NVRM: Xid (PCI:{bus}): {number}, pid=22884, name=VLLM::Worker"


@dataclass
class Row:
    """A log and what is known beside it, with the verdict that the rule gives."""

    rule: str
    lines: list[str]
    kind: Kind
    action: Action
    outside: Outside = field(default_factory=Outside)
    exit: dict[str, int] = field(default_factory=dict)
    levers: tuple[str, ...] = ()


PREEMPTED = (
    "Sequence group 221 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space."
)
OWN = ProcessRef(pid=7, command="VLLM::EngineCore", memory_bytes=40 << 30, ours=True)
FOREIGN = ProcessRef(pid=8, command="python", memory_bytes=40 << 30)
EXTERNAL = LOAD.format(stamp=STAMP, tps=9.0, running=3) + ", External prefix cache hit rate: 21.7%"
ROWS = [
    Row(
        "oom-killer-beside-connector",
        [*SERVING, EXTERNAL, KILL, *DEAD],
        Kind.HOST_OOM,
        Action.NEXT_CONFIG,
        levers=("kv_transfer_config",),
    ),
    Row(
        "oom-killer-page-cache",
        [*LOADING, UVM, KILL, f"{CORE}EngineCore failed to start."],
        Kind.HOST_OOM,
        Action.CLEAN,
    ),
    Row(
        "oom-killer-unified",
        [*SERVING, KILL, *DEAD],
        Kind.HOST_OOM,
        Action.NEXT_CONFIG,
        Outside(unified=True),
        levers=("gpu_memory_utilization",),
    ),
    Row("oom-killer", [*SERVING, *DEAD], Kind.HOST_OOM, Action.STOP_EXPLAIN, Outside(oom_kills=1)),
    Row("oom-killer", [*SERVING, *DEAD], Kind.HOST_OOM, Action.STOP_EXPLAIN, Outside(kernel=(KILL,))),
    Row(
        "oom-killer",
        LOADING,
        Kind.HOST_OOM,
        Action.STOP_EXPLAIN,
        Outside(kernel=(KILL,), pids=frozenset({2})),
        {"exit_signal": 9},
    ),
    Row(
        "oom-killer",
        [*LOADING, "Jan 01 01:00:00 h systemd[1]: vllm.service: Failed with result 'oom-kill'."],
        Kind.HOST_OOM,
        Action.STOP_EXPLAIN,
    ),
    Row("oom-killer", [*LOADING, "      Reason:       OOMKilled"], Kind.HOST_OOM, Action.STOP_EXPLAIN),
    Row(
        "killed-at-kv-allocation",
        [*LOADING, f"INFO {STAMP} gpu_executor.py:122] # GPU blocks: 11836, # CPU blocks: 4681", "Killed"],
        Kind.HOST_OOM,
        Action.NEXT_CONFIG,
        levers=("gpu_memory_utilization",),
    ),
    Row(
        "host-memory-fell-away",
        [*LOADING, *(f"MemAvailable {g} GiB" for g in (61.0, 33.4, 15.2, 7.0))],
        Kind.HOST_OOM,
        Action.KILL_TREE_NEXT_CONFIG,
        levers=("gpu_memory_utilization",),
    ),
    Row("gpu-hardware", [*SERVING, *FAULT], Kind.GPU_HW_FAULT, Action.STOP_OPERATOR, Outside(kernel=(xid(79),))),
    Row(
        "gpu-hardware",
        [*SERVING, *FAULT],
        Kind.GPU_HW_FAULT,
        Action.STOP_OPERATOR,
        Outside(kernel=(xid(79),), buses=("00000000:48:00.0",)),
    ),
    Row(
        "gpu-hardware",
        ["kernel: NVRM: _kgspRpcRecvPoll: GSP RM heartbeat timed out"],
        Kind.GPU_HW_FAULT,
        Action.STOP_OPERATOR,
    ),
    Row(
        "gpu-hardware-contained", [*SERVING, *FAULT], Kind.GPU_HW_FAULT, Action.RESTART_SAME, Outside(kernel=(xid(94),))
    ),
    Row("nvml-broken", [*SERVING, "Failed to initialize NVML: Unknown Error"], Kind.ENV_BROKEN, Action.STOP_OPERATOR),
    Row(
        "nvml-not-supported",
        ["nvmlDeviceGetMemoryInfo    -> NVML_ERROR_NOT_SUPPORTED   total=0"],
        Kind.NVML_UNSUPPORTED,
        Action.NO_ACTION,
    ),
    Row("held-by-our-own", busy(40.0, 79.2, 0.9), Kind.GPU_BUSY_ORPHAN, Action.REAP, Outside(holders=(FOREIGN, OWN))),
    Row(
        "held-by-our-own",
        [*busy(8.88, 121.69, 0.85), "1734, VLLM::EngineCore, 104277 MiB"],
        Kind.GPU_BUSY_ORPHAN,
        Action.REAP,
    ),
    Row(
        "sliver", busy(70.49, 79.2, 0.9), Kind.GPU_BUSY_FOREIGN, Action.NEXT_CONFIG, levers=("gpu_memory_utilization",)
    ),
    Row(
        "unified-memory-taken",
        busy(36.75, 121.63, 0.85),
        Kind.GPU_BUSY_UMA,
        Action.WAIT_VRAM,
        levers=("gpu_memory_utilization",),
    ),
    Row(
        "neighbour-while-measuring",
        no_blocks(-1.63),
        Kind.GPU_PROFILING_RACE,
        Action.RESTART_SAME,
        Outside(proven=True),
    ),
    Row(
        "neighbour-while-measuring",
        no_blocks(-1.63),
        Kind.GPU_PROFILING_RACE,
        Action.RESTART_SAME,
        Outside(foreign_grew_gib=1.0),
    ),
    Row(
        "more-than-the-weights",
        no_blocks(-3.21, 1.21),
        Kind.GPU_PROFILING_RACE,
        Action.RESTART_SAME,
        Outside(log_only=True),
    ),
    Row(
        "neighbour-grew",
        out_of_memory(SERVING, "execute_model"),
        Kind.OOM_RUNTIME,
        Action.WAIT_VRAM,
        Outside(foreign_grew_gib=20.0),
        levers=("gpu_memory_utilization",),
    ),
    Row(
        "neighbour-grew",
        out_of_memory(LOADING, "compile_or_warm_up_model"),
        Kind.OOM_CUDAGRAPH,
        Action.WAIT_VRAM,
        Outside(foreign_grew_gib=20.0),
        levers=("gpu_memory_utilization",),
    ),
    Row(
        "oom-with-adapters-at-start",
        [
            f"(APIServer pid=1) INFO {STAMP} [a.py:1] non-default args: {{'enable_lora': True}}",
            *out_of_memory(LOADING, "determine_available_memory", "profile_run"),
        ],
        Kind.OOM_LORA,
        Action.NEXT_CONFIG,
        levers=("max_loras", "max_num_seqs", "max_lora_rank"),
    ),
    Row(
        "oom-with-adapters-serving",
        [
            *SERVING,
            f"INFO {STAMP} logger.py:39] Received request c-1: lora_request: LoRARequest(lora_name='a')",
            *out_of_memory(SERVING, "execute_model"),
        ],
        Kind.OOM_LORA,
        Action.NEXT_CONFIG,
        levers=("max_num_batched_tokens", "gpu_memory_utilization"),
    ),
    Row(
        "cannot-be-killed",
        [*SERVING, "SIGKILL sent, waiting 30s", "   4242 Ds   -          python"],
        Kind.STOP_HANG,
        Action.STOP_OPERATOR,
    ),
    Row(
        "killed-by-a-probe",
        [
            *LOADING,
            SHARDS.format(p=9, n=4),
            "Liveness probe failed: dial tcp: connection refused",
            SHARDS.format(p=12, n=5),
        ],
        Kind.SLOW_STARTUP,
        Action.WAIT,
    ),
    Row(
        "terminated-during-the-start",
        [*LOADING, "KeyboardInterrupt: terminated"],
        Kind.SLOW_STARTUP,
        Action.RESTART_SAME,
        exit={"exit_code": 130},
    ),
    Row("bus-error", [*SERVING, *DEAD], Kind.SHM_EXHAUSTED, Action.CLEAN, exit={"exit_signal": 7}),
    Row(
        "bus-error",
        [*SERVING, f"{CORE}Worker proc VllmWorker-0 died unexpectedly (exit code: -7), shutting down executor."],
        Kind.SHM_EXHAUSTED,
        Action.CLEAN,
    ),
    Row(
        "illegal-instruction",
        [*SERVING, f"{CORE}Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down executor."],
        Kind.ENV_BROKEN,
        Action.STOP_EXPLAIN,
    ),
    Row(
        "slow-load",
        [*LOADING, SHARDS.format(p=9, n=4), WAITS.format(n=1), SHARDS.format(p=12, n=5)],
        Kind.SLOW_STARTUP,
        Action.WAIT,
    ),
    Row(
        "stale-lock",
        [
            *LOADING,
            *(f"Still waiting to acquire lock on /c/hub/.locks/m.lock (elapsed: {n}.0 seconds)..." for n in (10, 310)),
        ],
        Kind.STARTUP_WEDGED,
        Action.CLEAN,
    ),
    Row(
        "stale-lock",
        [
            *LOADING,
            "(Worker_TP2 pid=4) [aiter] waiting for baton release at /tmp/x.lock",
            *(WAITS.format(n=n) for n in range(3)),
        ],
        Kind.STARTUP_WEDGED,
        Action.CLEAN,
    ),
    Row(
        "placement-group-never-comes",
        [
            *START,
            f"INFO {STAMP} ray_utils.py:215] Waiting for creating a placement group of specs for 150 seconds. specs=[]",
        ],
        Kind.STARTUP_WEDGED,
        Action.STOP_EXPLAIN,
    ),
    Row(
        "start-stands-still",
        [*LOADING, *(WAITS.format(n=n % 6) for n in range(10))],
        Kind.STARTUP_WEDGED,
        Action.KILL_TREE_RESTART,
    ),
    Row(
        "workers-do-not-answer",
        [
            *SERVING,
            LOAD.format(stamp=STAMP, tps=9.0, running=3),
            LOAD.format(stamp=STAMP, tps=0.0, running=3),
            WAITS.format(n=1),
            WAITS.format(n=2),
        ],
        Kind.ENGINE_HUNG,
        Action.KILL_TREE_RESTART,
    ),
    Row(
        "metrics-stand-still",
        [
            *SERVING,
            *['vllm:num_requests_running{engine="0"} 1.0', 'vllm:generation_tokens_total{engine="0"} 1.84e+06'] * 2,
        ],
        Kind.ENGINE_HUNG,
        Action.KILL_TREE_RESTART,
    ),
    Row(
        "slower-than-itself",
        [*SERVING, *["decode 42.7 tok/s (baseline 73.9 tok/s)"] * 2],
        Kind.PERF_REGRESSION,
        Action.STOP_OPERATOR,
    ),
    Row(
        "vram-creeps",
        [*SERVING, *(f"vram device=0 used={g} GB running=0" for g in (54.0, 54.5, 56.0, 58.0))],
        Kind.VRAM_CREEP,
        Action.PLANNED_RECYCLE,
    ),
    Row(
        "preempted",
        [
            f"WARNING {STAMP} scheduler.py:1754] {PREEMPTED}",
        ],
        Kind.OVERLOAD,
        Action.OBSERVE,
    ),
]


def judged(row: Row) -> Diagnosis:
    return fed(row.lines, kernel_lines=True).verdict(outside=row.outside, **row.exit)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rule)
def test_each_rule_gives_its_verdict(row: Row) -> None:
    found = judged(row)
    assert (found.kind, found.action) == (row.kind, row.action), found
    assert tuple(change.lever for change in found.change) == row.levers
    assert found.summary
    assert found.advice


def test_every_rule_is_shown_here() -> None:
    repeated = {"unified-memory-does-not-come-back"}  # needs several launches, see below
    assert {row.rule for row in ROWS} | repeated == {rule.id for rule in RULES}


def test_three_starts_on_unified_memory_that_found_the_same_are_enough() -> None:
    once = [*busy(36.75, 121.63, 0.85), "child exited: code=1"]
    found = read([*once, *once, *once]).verdict()
    assert (found.kind, found.action, found.signature) == (
        Kind.GPU_BUSY_UMA,
        Action.STOP_EXPLAIN,
        "unified-memory-does-not-come-back",
    )
    assert read([*once, *once]).verdict().action is Action.WAIT_VRAM
    moving = [*busy(36.75, 121.63, 0.85), "child exited: code=1", *busy(40.0, 121.63, 0.85), "child exited: code=1"]
    assert read([*moving, *once]).verdict().action is Action.WAIT_VRAM


WITHOUT = {
    "no rule, no change": (busy(40.0, 79.2, 0.9), Outside(), Kind.GPU_BUSY_FOREIGN, Action.WAIT_VRAM),
    "a foreign holder is waited for": (
        busy(40.0, 79.2, 0.9),
        Outside(holders=(FOREIGN,)),
        Kind.GPU_BUSY_FOREIGN,
        Action.WAIT_VRAM,
    ),
    "1.1 % of the card is waited for": (busy(70.4, 79.2, 0.9), Outside(), Kind.GPU_BUSY_FOREIGN, Action.WAIT_VRAM),
    "a small card's 10 % is waited for": (busy(3.22, 4.0, 0.9), Outside(), Kind.GPU_BUSY_FOREIGN, Action.WAIT_VRAM),
    "no proof, no race": (no_blocks(-1.63), Outside(), Kind.KV_NO_BLOCKS, Action.NEXT_CONFIG),
    "guesses are for files": (no_blocks(-3.21, 1.21), Outside(), Kind.KV_NO_BLOCKS, Action.NEXT_CONFIG),
    "a neighbour that took little is not blamed": (
        no_blocks(-1.63),
        Outside(foreign_grew_gib=0.3),
        Kind.KV_NO_BLOCKS,
        Action.NEXT_CONFIG,
    ),
    "nor for an OOM": (
        out_of_memory(SERVING, "execute_model"),
        Outside(foreign_grew_gib=0.1),
        Kind.OOM_RUNTIME,
        Action.NEXT_CONFIG,
    ),
    "an Xid of the program's own keeps the fault": (
        [*SERVING, *FAULT],
        Outside(kernel=(xid(31), xid(13), xid(43))),
        Kind.CUDA_FAULT,
        Action.RESTART_SAME,
    ),
    "an Xid on another GPU is not ours": (
        [*SERVING, *FAULT],
        Outside(kernel=(xid(79),), buses=("0000:0b:00.0",)),
        Kind.CUDA_FAULT,
        Action.RESTART_SAME,
    ),
    "an engine that serves on is not stopped by an Xid": (
        SERVING,
        Outside(kernel=(xid(79),)),
        Kind.NONE,
        Action.NO_ACTION,
    ),
    "nor by an OOM kill of somebody else": (SERVING, Outside(kernel=(KILL,)), Kind.NONE, Action.NO_ACTION),
    "a kill of another process is not ours": (
        [*SERVING, *DEAD],
        Outside(kernel=(KILL,), pids=frozenset({99})),
        Kind.ENGINE_DEAD,
        Action.RESTART_SAME,
    ),
    "nor one of a database": (
        [*SERVING, *DEAD],
        Outside(kernel=(KILL.replace("VLLM::EngineCor", "postgres"),)),
        Kind.ENGINE_DEAD,
        Action.RESTART_SAME,
    ),
    "a named cause is not covered by a kill": (
        [*SERVING, *FAULT],
        Outside(oom_kills=1),
        Kind.CUDA_FAULT,
        Action.RESTART_SAME,
    ),
    "one notice is no wedge": ([*LOADING, WAITS.format(n=1)], Outside(), Kind.NONE, Action.NO_ACTION),
    "a short wait for a lock is none": (
        [*LOADING, "Still waiting to acquire lock on /c/m.lock (elapsed: 10.0 seconds)..."],
        Outside(),
        Kind.NONE,
        Action.NO_ACTION,
    ),
    "notices before serving are forgotten": (
        [*LOADING, *(WAITS.format(n=n % 6) for n in range(12)), SERVING[-1]],
        Outside(),
        Kind.NONE,
        Action.NO_ACTION,
    ),
    "memory that rises again is not running out": (
        [*LOADING, *(f"MemAvailable {g} GiB" for g in (61.0, 33.4, 40.0, 7.0))],
        Outside(),
        Kind.NONE,
        Action.NO_ACTION,
    ),
    "tokens that move are no hang": (
        [
            *SERVING,
            'vllm:num_requests_running{engine="0"} 1.0',
            *(f'vllm:generation_tokens_total{{engine="0"}} {n}' for n in (1.0, 2.0)),
        ],
        Outside(),
        Kind.NONE,
        Action.NO_ACTION,
    ),
    "a SIGTERM that we sent is no slow start": (LOADING, Outside(), Kind.NONE, Action.NO_ACTION),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_does_not_apply_changes_nothing(name: str) -> None:
    lines, outside, kind, action = WITHOUT[name]
    found = fed(lines, kernel_lines=True).verdict(outside=outside)
    assert (found.kind, found.action) == (kind, action), found


def test_a_live_engines_output_holds_no_word_of_others() -> None:
    """No kernel, service manager or nvidia-smi speaks in what the daemon's classifier reads."""
    for row in ROWS:
        if row.outside != Outside() or row.exit:
            continue
        alive = Classifier()
        for line in [*SERVING, *(line for line in row.lines if not line.startswith("("))]:
            alive.feed(line)
        found = alive.verdict()
        assert found.kind in (Kind.NONE, Kind.OVERLOAD), (row.rule, found)
        assert found.change == ()


def test_an_exit_that_a_journal_tells_of_counts() -> None:
    exited = "Jan 01 01:00:00 h systemd[1]: vllm.service: Main process exited, code=exited, status=1/FAILURE"
    killed = "Jan 01 01:00:00 h systemd[1]: vllm.service: Main process exited, code=killed, status=9/KILL"
    assert fed([*SERVING, killed], kernel_lines=True).verdict().kind is Kind.ENGINE_DEAD
    assert fed([*LOADING, exited], kernel_lines=True).verdict().kind is Kind.UNKNOWN
    stopped = [*SERVING, "(APIServer pid=1) INFO:     Shutting down", killed.replace("9/KILL", "15/TERM")]
    assert fed(stopped, kernel_lines=True).verdict().kind is Kind.NONE
    assert fed([*SERVING, killed], kernel_lines=False).verdict().kind is Kind.NONE


def test_the_first_rank_that_failed_is_named() -> None:
    lines = [line.replace("EngineCore pid=2", "Worker_TP3 pid=5") for line in out_of_memory(SERVING, "execute_model")]
    found = fed(lines).verdict()
    assert found.numbers["rank"] == 3
    assert found.evidence[0].role == "Worker_TP3"
    old = (
        "(VllmWorker rank=2 pid=203) ERROR 01-01 00:00:13 [multiproc_executor.py:492] ValueError: Free memory on "
        "device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.95, 45.01 GiB)."
    )
    assert fed([old]).verdict().numbers["rank"] == 2


def test_a_proven_configuration_turns_the_h200s_no_blocks_into_a_race() -> None:
    lines = list(raw_lines(CAPTURES / "h200-vllm-0.26.0" / "05-no-cache-blocks.log"))
    assert fed(lines).verdict().kind is Kind.KV_NO_BLOCKS
    assert fed(lines).verdict(outside=Outside(proven=True)).kind is Kind.GPU_PROFILING_RACE


def test_a_sliver_is_fitted_beside_with_the_computed_value() -> None:
    found = fed(busy(70.49, 79.2, 0.9)).verdict()
    assert found.change == (Change("gpu_memory_utilization", "down", 0.888),)  # floor((70.49 - 0.146) / 79.2, 0.001)
    assert found.signature == "gpu-free-below-util"
