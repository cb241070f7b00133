"""The classifier on whole outputs of real vLLM (H200, 0.26; CPU, 0.32) and on the corpus of public logs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import labelled
from labelled import CAPTURES, CORPUS, Label, fed, raw_lines, verdict
from supervisord_vllm.core.diagnosis import Action, Change, Kind
from supervisord_vllm.engine.classifier import Classifier
from supervisord_vllm.engine.events import Event, FatalEvent, LedgerEvent, PhaseEvent

H200 = CAPTURES / "h200-vllm-0.26.0"
CPU = CAPTURES / "cpu-vllm-0.32.0"

# What the corpus scores today (96 logs). Raise these when the classifier improves; never lower them.
CORPUS_KINDS, CORPUS_ACTIONS, CORPUS_LEVERS = 93, 95, 26

# Captures that labels.tsv leaves out.
MORE: dict[str, tuple[Kind, Action]] = {
    "c1-kv-100G": (Kind.BAD_CONFIG, Action.STOP_EXPLAIN),
    "c2-gpu-memory-utilization-0.9-with-6GiB-hog": (Kind.GPU_BUSY_FOREIGN, Action.WAIT_VRAM),
    "c3-gpu-memory-utilization-0.01": (Kind.KV_NO_BLOCKS, Action.NEXT_CONFIG),
    "c4-gpu-memory-utilization-1.5": (Kind.BAD_CONFIG, Action.STOP_EXPLAIN),
    "d2-bad-value": (Kind.BAD_CONFIG, Action.STOP_EXPLAIN),
    "e2-model-empty-dir": (Kind.BAD_CONFIG, Action.STOP_EXPLAIN),
    "e3-model-hub-offline": (Kind.BAD_CONFIG, Action.STOP_EXPLAIN),
    "h1-sigstop-enginecore": (Kind.NONE, Action.NO_ACTION),
    "i1-sigterm-streaming-default": (Kind.NONE, Action.NO_ACTION),
    "i12d-sigint-engine-initializing": (Kind.NONE, Action.NO_ACTION),
    "j1-kill9-apiserver-uni": (Kind.NONE, Action.NO_ACTION),
    "k2-cgroup-oom-at-start-uni-spawn": (Kind.HOST_OOM, Action.STOP_EXPLAIN),
    "l1-preemption": (Kind.OVERLOAD, Action.OBSERVE),
    "n2-bf16-eager-block16": (Kind.UNKNOWN, Action.RESTART_SAME),
    "p2-plugin-oom-at-kv-alloc": (Kind.OOM_KV_ALLOC, Action.NEXT_CONFIG),
    "p4-plugin-oom-step-cputree": (Kind.OOM_RUNTIME, Action.NEXT_CONFIG),
    "p6-plugin-segv-step": (Kind.ENGINE_DEAD, Action.RESTART_SAME),
    "p7-plugin-exit7-step": (Kind.ENGINE_DEAD, Action.RESTART_SAME),
}


def events(path: Path) -> list[Event]:
    classifier = Classifier()
    return [event for line in raw_lines(path) for event in classifier.feed(line)]


@pytest.mark.parametrize("label", labelled.labels(CAPTURES), ids=lambda label: label.path.stem)
def test_every_capture_gets_its_kind_action_lever_and_numbers(label: Label) -> None:
    found = verdict(label.path)
    assert (found.kind.value, found.action.value) == (label.kind, label.action), found
    assert not label.wrong_numbers(found)
    if label.lever:
        assert label.lever_right(found)


@pytest.mark.parametrize("name", MORE)
def test_captures_without_a_label_are_judged_too(name: str) -> None:
    found = verdict(CPU / f"{name}.log")
    assert (found.kind, found.action) == MORE[name], found


def test_the_corpus_does_not_get_worse(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = actions = levers = with_lever = 0
    confusion: Counter[tuple[str, str]] = Counter()
    for label in labelled.labels(CORPUS):
        found = verdict(label.path)
        kinds += label.kind_right(found)
        actions += label.action_right(found)
        if label.lever and label.action == Action.NEXT_CONFIG.value:
            with_lever += 1
            levers += label.lever_right(found)
        if not label.kind_right(found):
            confusion[label.kind, found.kind.value] += 1
    with capsys.disabled():
        print(
            f"\ncorpus: kind {kinds}/96, action {actions}/96, lever {levers}/{with_lever}; confused (label -> verdict):"
        )
        for (label_kind, found_kind), count in sorted(confusion.items()):
            print(f"  {count} {label_kind} -> {found_kind}")
    assert kinds >= CORPUS_KINDS
    assert actions >= CORPUS_ACTIONS
    assert levers >= CORPUS_LEVERS


@pytest.mark.parametrize("folder", [CAPTURES, CORPUS], ids=["captures", "corpus"])
def test_what_is_no_failure_changes_no_configuration(folder: Path) -> None:
    quiet = [label for label in labelled.labels(folder) if label.kind in ("none", "false_alarm", "overload")]
    assert len(quiet) >= 8
    for label in quiet:
        found = verdict(label.path)
        assert not found.change, label.path
        assert found.action in (Action.NO_ACTION, Action.OBSERVE, Action.WAIT), label.path


def test_a_start_goes_through_its_phases_in_order() -> None:
    phases = [event.phase for event in events(H200 / "01-seed-cold.log") if isinstance(event, PhaseEvent)]
    assert phases == ["importing", "weights", "compiling", "profiling", "capturing", "serving"]


def test_a_clean_start_is_no_fatal_event() -> None:
    assert not [event for event in events(H200 / "01-seed-cold.log") if isinstance(event, FatalEvent)]


def test_the_whole_account_of_a_start_is_in_the_ledger() -> None:
    ledger: dict[str, object] = {}
    for event in events(H200 / "01-seed-cold.log"):
        if isinstance(event, LedgerEvent):
            ledger.update(event.numbers)
    assert ledger == {
        "version": "0.26.0",
        "port": 8100,
        "compile_cold_s": 9.22,
        "world_size": 1,
        "util": 0.9,
        "max_model_len": 8192,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,
        "total_gib": 139.8,
        "free_gib": 139.29,
        "requested_gib": 125.82,
        "weights_gib": 14.32,
        "activation_gib": 1.13,
        "non_torch_gib": 0.22,
        "graphs_gib": 0.14,
        "available_kv_gib": 110.15,
        "kv_gib": 110.15,
        "kv_tokens": 2062544,
        "concurrency": 251.78,
        "compile_s": 19.03,
        "init_s": 37.1,
        "load_s": 1.979449,
        "capture_s": 1.0,
        "profile_s": 0.44,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "architecture": "Qwen2ForCausalLM",
        "attention_backend": "FLASH_ATTN",
        "enforce_eager": "False",
        "kv_cache_dtype": "auto",
        "model_runner": "V2",
    }


def test_a_negative_kv_cache_is_in_the_ledger_before_the_failure() -> None:
    numbers = [event.numbers for event in events(H200 / "05-no-cache-blocks.log") if isinstance(event, LedgerEvent)]
    assert {"available_kv_gib": -1.63} in numbers


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("04-cotenant-free-below-util", "EngineCore failed to start."),
        ("08-runtime-oom", "EngineCore encountered a fatal error."),
    ],
)
def test_the_engine_core_that_dies_says_so_once(name: str, text: str) -> None:
    assert [event for event in events(H200 / f"{name}.log") if isinstance(event, FatalEvent)] == [FatalEvent(text)]


def test_the_fitting_utilization_is_computed_from_the_printed_numbers() -> None:
    found = verdict(H200 / "04-cotenant-free-below-util.log")
    assert found.change == (Change("gpu_memory_utilization", "down", 0.705),)  # floor((98.77 - 0.146) / 139.8, 0.001)
    assert found.numbers["shortfall_gib"] == 27.05


def test_a_shortfall_smaller_than_a_context_is_fitted_beside_not_waited_for() -> None:
    found = verdict(H200 / "20-profile-oom.log")
    assert found.action is Action.NEXT_CONFIG
    assert found.change == (Change("gpu_memory_utilization", "down", 0.117),)


def test_the_length_that_fits_is_vllms_own_estimate() -> None:
    assert verdict(H200 / "06-len-over-kv.log").change[0] == Change("max_model_len", "down", 60000)
    assert verdict(CPU / "a-maxlen-over-kv.log").change[0] == Change("max_model_len", "down", 896)


def test_a_length_above_the_models_is_clamped_to_the_models() -> None:
    found = verdict(CPU / "a2-maxlen-over-model.log")
    assert found.change == (Change("max_model_len", "down", 4096),)
    assert found.numbers == {"max_model_len": 100000, "derived_max_model_len": 4096}


def test_the_cpu_engines_shortfall_is_read_like_the_gpus() -> None:
    found = verdict(CPU / "c2-gpu-memory-utilization-0.9-with-6GiB-hog.log")
    assert found.numbers == {
        "free_gib": 16.8,
        "total_gib": 23.54,
        "util": 0.9,
        "requested_gib": 21.19,
        "shortfall_gib": 4.39,
    }
    assert found.change == (Change("gpu_memory_utilization", "down", 0.707),)


def test_a_negative_cpu_kv_cache_means_more_not_less() -> None:
    found = verdict(CPU / "c3-gpu-memory-utilization-0.01.log")
    assert found.change == (Change("gpu_memory_utilization", "up", 0.021),)  # 0.01 + 0.24 / 23.54
    assert found.numbers["available_kv_gib"] == -0.23


def test_a_kv_cache_that_could_not_be_allocated_says_how_far_to_go_down() -> None:
    found = verdict(H200 / "24-sampler-warmup-oom.log")
    assert found.change == (Change("gpu_memory_utilization", "down", 0.956),)  # 0.96 - (4.1 - 3.8 + 0.146) / 139.8


def test_the_cause_is_the_evidence_not_the_last_line_of_the_cascade() -> None:
    found = verdict(H200 / "08-runtime-oom.log")
    assert found.evidence[0].line == 138
    assert found.evidence[0].role == "EngineCore"
    assert found.evidence[0].text.startswith(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 110.00 MiB."
    )
    assert found.phase == "runtime"


def test_the_signature_of_a_failure_does_not_depend_on_pids_and_sizes() -> None:
    path = H200 / "08-runtime-oom.log"
    other = [line.replace(b"2409", b"77").replace(b"110.00 MiB", b"96.00 MiB") for line in raw_lines(path)]
    assert fed(other).verdict().signature == verdict(path).signature == "oom-runtime-forward"


def test_an_unknown_failure_shows_its_first_error_lines_and_a_signature_without_digits() -> None:
    found = verdict(CPU / "n2-bf16-eager-block16.log")
    assert found.evidence[0].text.startswith("ValueError: No common block size for ")
    assert found.signature.startswith("unknown:ValueError: No common block size for #")
    assert not any(character.isdigit() for character in found.signature)
    assert not found.change


def test_exit_zero_after_a_fatal_error_keeps_the_kind_of_the_fatal_error() -> None:
    assert fed(raw_lines(CPU / "p3-plugin-oom-step.log")).verdict(exit_code=0).kind is Kind.OOM_RUNTIME


@pytest.mark.parametrize("ending", [{"exit_code": 0}, {"exit_code": 1}, {"exit_signal": 9}])
def test_a_serving_engine_that_ends_without_a_word_is_engine_dead(ending: dict[str, int]) -> None:
    classifier = fed(raw_lines(H200 / "11-kill-parent.log"))
    found = classifier.verdict(**ending)  # type: ignore[arg-type]
    assert (found.kind, found.action, found.phase) == (Kind.ENGINE_DEAD, Action.RESTART_SAME, "runtime")


def test_a_start_killed_without_a_word_is_engine_dead() -> None:
    found = fed(raw_lines(CPU / "k2-cgroup-oom-at-start-uni-spawn.log")).verdict(exit_signal=9)
    assert (found.kind, found.phase) == (Kind.ENGINE_DEAD, "startup")


def test_a_stop_that_we_asked_for_is_no_failure() -> None:
    lines = list(raw_lines(H200 / "11-kill-parent.log"))
    classifier = fed(lines)
    classifier.cut()
    classifier.feed("(EngineCore pid=1) ERROR 12-01 01:00:00 [core.py:1] EngineCore encountered a fatal error.")
    classifier.feed("(EngineCore pid=1) ERROR 12-01 01:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory.")
    assert classifier.verdict(exit_code=0, expected_stop=True).kind is Kind.NONE


def test_a_failure_before_our_stop_signal_keeps_its_kind() -> None:
    classifier = fed(raw_lines(H200 / "08-runtime-oom.log"))
    classifier.cut()
    assert classifier.verdict(exit_signal=15, expected_stop=True).kind is Kind.OOM_RUNTIME
