"""Logs with their labels: what each log is, what is right to do, and the numbers worth extracting."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from supervisord_vllm.core.diagnosis import Diagnosis, Kind, Number
from supervisord_vllm.engine.classifier import Classifier
from supervisord_vllm.engine.launches import read

DATA = Path(__file__).parent / "data"
CAPTURES = DATA / "captures"
CORPUS = DATA / "corpus"
PUBLIC = DATA / "public"

_HARNESS = re.compile(rb"\[\+ {0,4}[\d.]+ (?P<stream>O|E|--)\] ?")
_HEALTHY = {Kind.NONE.value, Kind.FALSE_ALARM.value}

# The labels' shorthand for levers: lever, direction.
LEVERS = {
    "util_down": ("gpu_memory_utilization", "down"),
    "util_up": ("gpu_memory_utilization", "up"),
    "max_model_len": ("max_model_len", "down"),
    "max_num_seqs": ("max_num_seqs", "down"),
    "max_loras": ("max_loras", "down"),
    "mm_limits": ("limit_mm_per_prompt", "down"),
    "max_num_batched_tokens_up": ("max_num_batched_tokens", "up"),
    "max_num_batched_tokens_down": ("max_num_batched_tokens", "down"),
    "dtype_half": ("dtype", "switch"),
    "swap_space_down": ("swap_space", "down"),
    "env_expandable_segments": ("env:PYTORCH_ALLOC_CONF", "switch"),
    "raise_ready_timeout": ("env:VLLM_ENGINE_READY_TIMEOUT_S", "up"),
    "raise_nofile": ("limit:nofile", "up"),
    "disable_kv_connector": ("kv_transfer_config", "switch"),
    "max_lora_rank_up": ("max_lora_rank", "up"),
    "limit_jit_jobs": ("env:MAX_JOBS", "down"),
}


@dataclass(frozen=True)
class Label:
    path: Path
    kind: str
    action: str
    lever: str
    numbers: dict[str, Number]

    def kind_right(self, verdict: Diagnosis) -> bool:
        """`none` and `false_alarm` are the same to whoever has to act."""
        return verdict.kind.value == self.kind or {verdict.kind.value, self.kind} <= _HEALTHY

    def action_right(self, verdict: Diagnosis) -> bool:
        return verdict.action.value == self.action

    def lever_right(self, verdict: Diagnosis) -> bool:
        """Whether a lever that the label names is among those of the verdict, in the right direction."""
        wanted = {LEVERS[name] for name in self.lever.split("_or_")}
        return any((change.lever, change.direction) in wanted for change in verdict.change)

    def wrong_numbers(self, verdict: Diagnosis) -> dict[str, tuple[Number, Number | None]]:
        wrong: dict[str, tuple[Number, Number | None]] = {}
        for name, value in self.numbers.items():
            got = verdict.numbers.get(name)
            exact = isinstance(value, (int, float)) and isinstance(got, (int, float))
            if not exact or abs(float(got or 0) - float(value)) > max(0.006, 0.001 * abs(float(value))):
                wrong[name] = (value, got)
        return wrong


def labels(folder: Path) -> list[Label]:
    with (folder / "labels.tsv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        Label(
            folder / row["file"],
            row["kind"],
            row["expected_action"].partition(":")[0],
            row["expected_action"].partition(":")[2],
            json.loads(row["numbers"]),
        )
        for row in rows
    ]


def raw_lines(path: Path) -> Iterator[bytes]:
    """The engine's lines; the CPU captures carry the recording harness's stamps and remarks, which are taken off."""
    for line in path.read_bytes().split(b"\n"):
        stamp = _HARNESS.match(line)
        if stamp is None:
            yield line
        elif stamp["stream"] != b"--":
            yield line[stamp.end() :]


def fed(lines: Iterable[bytes | str], *, kernel_lines: bool = False) -> Classifier:
    classifier = Classifier(kernel_lines=kernel_lines)
    for line in lines:
        classifier.feed(line)
    return classifier


def verdict(path: Path) -> Diagnosis:
    """What `diagnose` would say."""
    return read(raw_lines(path)).verdict()
