"""How well the classifier does on a family of failures whose logs nobody had read: for each family of the public logs,
the signatures that only its own logs could have taught are taken away (their words stand in that family's logs, in no
other log, and not in the text that the messages were written from), then the family's logs are scored.

    python benchmarks/diagnose_leave_out.py MESSAGES.md

``MESSAGES.md`` is any text that lists the messages as vLLM's source prints them. Prints a Markdown table.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import labelled
from supervisord_vllm.engine.launches import read
from supervisord_vllm.engine.signature import Catalogue, Signature, catalogue

FAMILIES = {
    "memory taken before the start": "gpu_busy_foreign gpu_busy_orphan gpu_busy_uma gpu_profiling_race",
    "KV sizing": "kv_no_blocks kv_len_too_long kv_state_slots",
    "out of memory at start": "oom_weights oom_profile oom_sampler_warmup oom_cudagraph oom_lora oom_fragmentation "
    "oom_env_limit oom_kv_alloc",
    "out of memory while serving": "oom_runtime oom_mm vram_creep",
    "host": "host_oom shm_exhausted os_limit",
    "process and engine": "engine_dead engine_hung startup_wedged slow_startup worker_died nccl_hang engine_bug "
    "poison_request stop_hang",
    "GPU fault and environment": "cuda_fault gpu_hw_fault env_broken nvml_unsupported",
    "configuration and assets": "bad_config port_in_use compile_cache_corrupt hub_transient hub_denied weights_corrupt",
    "performance": "overload perf_regression",
    "not a failure": "false_alarm none",
}


def without(signatures: Catalogue, gone: set[str]) -> Catalogue:
    """The catalogue less these signatures."""
    groups = ((anchor, tuple(s for s in group if s.id not in gone)) for anchor, group in signatures.by_anchor)
    return Catalogue(
        tuple(s for s in signatures.signatures if s.id not in gone),
        signatures.stages,
        tuple((anchor, group) for anchor, group in groups if group),
    )


def score(logs: list[labelled.Label], signatures: Catalogue) -> tuple[int, int]:
    """How many kinds and actions are right."""
    verdicts = [(log, read(labelled.raw_lines(log.path), signatures=signatures).verdict()) for log in logs]
    return sum(log.kind_right(v) for log, v in verdicts), sum(log.action_right(v) for log, v in verdicts)


def main() -> None:
    """Print the table."""
    told = Path(sys.argv[1]).read_text("utf-8")
    shipped = catalogue()
    logs = labelled.labels(labelled.CORPUS)
    texts = {log.path: log.path.read_text("utf-8", "replace") for log in logs}
    captured = "".join(p.read_text("utf-8", "replace") for p in sorted(labelled.CAPTURES.glob("*.log")))
    untold = [s for s in shipped.signatures if s.anchor not in told and s.anchor not in captured]
    bare = without(shipped, {s.id for s in shipped.signatures if s.anchor not in told})

    def learnt(signature: Signature, family: set[Path]) -> bool:
        holders = {path for path, text in texts.items() if signature.anchor in text}
        return bool(holders) and holders <= family

    print("| family | logs | all signatures: kind, action | family left out | told messages only | left out |")
    print("|---|---|---|---|---|---|")
    sums = [0] * 7
    for name, kinds in FAMILIES.items():
        own = [log for log in logs if log.kind in kinds.split()]
        gone = {s.id for s in untold if learnt(s, {log.path for log in own})}
        row = (len(own), *score(own, shipped), *score(own, without(shipped, gone)), *score(own, bare))
        sums = [a + b for a, b in zip(sums, row, strict=True)]
        print(line(name, row, ", ".join(sorted(gone)) or "none"))
    print(line("**all**", tuple(sums), ""))


def line(name: str, row: tuple[int, ...], gone: str) -> str:
    """One row of the table."""
    return f"| {name} | {row[0]} | {row[1]}, {row[2]} | {row[3]}, {row[4]} | {row[5]}, {row[6]} | {gone} |"


if __name__ == "__main__":
    main()
