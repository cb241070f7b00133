"""Log shapes: the same message in every wrapping gives the same verdict; hostile text gives none."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labelled import CAPTURES, CORPUS, fed, raw_lines
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.engine.classifier import MAX_CAUSES, MAX_ERRORS, Classifier, classify
from supervisord_vllm.engine.judgement import EVIDENCE_TEXT, render
from supervisord_vllm.engine.lines import LIMIT, parse, segments
from supervisord_vllm.engine.signature import SignatureError, catalogue, compile_catalogue

if sys.version_info >= (3, 11):
    from re import _parser as sre_parse  # type: ignore[attr-defined]
else:
    import sre_parse

FREE = (
    "ValueError: Free memory on device cuda:0 (98.77/139.8 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 125.82 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 110.00 MiB. GPU 0 has a total capacity of "
    "139.80 GiB of which 41.56 MiB is free."
)
STAMP = "12-01 01:23:19"
SERVING = [
    f"(APIServer pid=1) INFO {STAMP} [api_server.py:1] Starting vLLM server on http://0.0.0.0:8100",
    f"(EngineCore pid=2) INFO {STAMP} [core.py:1] init engine (profile, create kv cache, warmup model) took 3.10 s",
    "INFO:     Application startup complete.",
]

SHAPES = {
    "engine core": f"(EngineCore pid=7) ERROR {STAMP} [core.py:1330] {FREE}",
    "engine core of data parallel": f"(EngineCore_DP0 pid=7) ERROR {STAMP} [core.py:1330] {FREE}",
    "engine core 0.9": f"(EngineCore_0 pid=7) ERROR {STAMP} [core.py:1330] {FREE}",
    "worker": f"(Worker_TP0 pid=7) ERROR {STAMP} [multiproc_executor.py:9] {FREE}",
    "worker with rank": f"(VllmWorker rank=2 pid=203) ERROR {STAMP} [multiproc_executor.py:492] {FREE}",
    "debug path": f"(EngineCore pid=7) ERROR {STAMP} [v1/engine/core.py:1330] {FREE}",
    "untagged traceback": FREE,
    "tagged traceback": f"(EngineCore pid=7) {FREE}",
    "untagged record": f"ERROR {STAMP} [core.py:515] {FREE}",
    "0.6 record": f"ERROR {STAMP} core.py:515] {FREE}",
    "logging prefix": f"node-3 ERROR {STAMP} [core.py:515] {FREE}",
    "colours": f"\x1b[1;36m(EngineCore_0 pid=7)\x1b[0;0m \x1b[31mERROR\x1b[0m \x1b[90m{STAMP} [x.py:5]\x1b[0m {FREE}",
    "carriage return at the end": f"(EngineCore pid=7) ERROR {STAMP} [core.py:1330] {FREE}\r",
    "behind a progress bar": f"Loading shards:  0%|\rLoading shards: 50%|\r(EngineCore pid=7) {FREE}",
    "docker": f"2026-01-01T07:44:10.000000000Z (EngineCore pid=7) ERROR {STAMP} [core.py:1] {FREE}",
    "container file": f"2026-01-01T07:44:10.0Z stderr F (EngineCore pid=7) ERROR {STAMP} [core.py:1] {FREE}",
    "compose": f"vllm-1  | (EngineCore pid=7) ERROR {STAMP} [core.py:1] {FREE}",
    "kubectl": f"[pod/vllm-0/vllm] (EngineCore pid=7) ERROR {STAMP} [core.py:1] {FREE}",
    "journald": f"Jan 01 18:30:11 host vllm[8707]: (EngineCore pid=7) ERROR {STAMP} [core.py:1] {FREE}",
    "journald iso": f"2026-01-01T18:30:11+0000 host vllm[8707]: (EngineCore pid=7) ERROR {STAMP} [core.py:1] {FREE}",
    "torch rank": f"[rank0]: {FREE}",
    "json": json.dumps({"levelname": "ERROR", "processName": "EngineCore", "process": 7, "message": f"failed\n{FREE}"}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_message_is_read_in_every_shape(shape: str) -> None:
    found = classify([SHAPES[shape]])
    assert found.kind is Kind.GPU_BUSY_FOREIGN, found
    assert found.numbers["free_gib"] == 98.77


def test_bytes_and_text_are_the_same() -> None:
    assert classify([FREE.encode()]) == classify([FREE])


@pytest.mark.parametrize(
    "line",
    [
        f"(APIServer pid=1) INFO {STAMP} [logger.py:41] Received request cmpl-1: prompt: 'why {OOM} {FREE}'",
        f"(APIServer pid=1) ERROR {STAMP} [serving.py:500] {OOM}",
        f"(APIServer pid=1) ERROR {STAMP} [serving.py:500] EngineCore encountered a fatal error.",
        f"(APIServer pid=1) {OOM}",
        f"(APIServer pid=1) (EngineCore pid=2) ERROR {STAMP} [core.py:1] {OOM}",
        f'INFO:     127.0.0.1:1 - "GET /v1/{OOM} HTTP/1.1" 404 Not Found',
        f"(EngineCore pid=2) INFO {STAMP} [core.py:1] {OOM}",
        f"ValueError: cannot parse 'RuntimeError: {OOM}'",
        OOM,
        FREE,
        "Killed",
        "!!!!!!! Segfault encountered !!!!!!!",
        "kernel: NVRM: Xid (PCI:0000:48:00): 79, pid=1, GPU has fallen off the bus.",
        "OSError: [Errno 98] Address already in use",
        "vllm: error: unrecognized arguments: --x",
    ],
)
def test_what_a_client_can_make_a_serving_engine_print_changes_nothing(line: str) -> None:
    found = fed([*SERVING, line]).verdict()
    assert (found.kind, found.change) == (Kind.NONE, ())
    dead = f"(APIServer pid=1) WARNING {STAMP} [core_client.py:1] [shutdown] MPClient: engine core exited unexpectedly;"
    died = fed([*SERVING, line, dead]).verdict(exit_code=0)
    assert not died.change, "a death of another cause must not be blamed on quoted text"
    assert died.kind in (Kind.ENGINE_DEAD, Kind.HOST_OOM)


def test_the_good_news_that_begins_like_the_worst_error_is_no_failure() -> None:
    line = (
        f"(EngineCore pid=2) INFO {STAMP} [gpu_worker.py:857] Free memory on device (139.29/139.8 GiB) on startup. "
        "Desired GPU memory utilization is (0.9, 125.82 GiB). Actual usage is 14.32 GiB for weight, 1.13 GiB for peak "
        "activation, "
        "0.22 GiB for non-torch memory, and 0.14 GiB for CUDAGraph memory."
    )
    assert classify([line]).kind is Kind.NONE


def test_what_was_said_before_serving_was_survived() -> None:
    assert fed([f"(EngineCore pid=2) ERROR {STAMP} [x.py:1] {OOM}", *SERVING]).verdict().kind is Kind.NONE


def test_the_cause_may_stand_before_or_after_the_news_of_the_death() -> None:
    cause = [
        f"(EngineCore pid=2) ERROR {STAMP} [core.py:1] EngineCore encountered a fatal error.",
        f"(EngineCore pid=2) ERROR {STAMP} [core.py:1] {OOM}",
    ]
    news = [
        f"(APIServer pid=1) WARNING {STAMP} [core_client.py:1] [shutdown] MPClient: engine core exited unexpectedly;",
        f"(APIServer pid=1) ERROR {STAMP} [async_llm.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore",
        "INFO:     Shutting down",
    ]
    for order in ([*cause, *news], [*news, *cause]):
        assert fed([*SERVING, *order]).verdict(exit_code=0).kind is Kind.OOM_RUNTIME


STAGES = {
    ("gpu_worker.py:load_model", "linear.py:create_weights"): Kind.OOM_WEIGHTS,
    ("gpu_worker.py:determine_available_memory", "gpu_model_runner.py:profile_run"): Kind.OOM_PROFILE,
    ("gpu_worker.py:determine_available_memory", "gpu_model_runner.py:_dummy_sampler_run"): Kind.OOM_PROFILE,
    ("core.py:_initialize_kv_caches", "gpu_worker.py:initialize_from_config"): Kind.OOM_KV_ALLOC,
    ("abstract.py:initialize_from_config", "gpu_worker.py:compile_or_warm_up_model"): Kind.OOM_CUDAGRAPH,
    ("gpu_worker.py:compile_or_warm_up_model", "gpu_model_runner.py:capture_model"): Kind.OOM_CUDAGRAPH,
    ("gpu_worker.py:compile_or_warm_up_model", "gpu_model_runner.py:_dummy_sampler_run"): Kind.OOM_SAMPLER_WARMUP,
    ("gpu_worker.py:compile_or_warm_up_model", "warmup.py:execute_model"): Kind.OOM_CUDAGRAPH,
    ("gpu_worker.py:init_device",): Kind.GPU_BUSY_FOREIGN,
}


def _traceback(frames: tuple[str, ...], header: str) -> list[str]:
    prefix = f"(EngineCore pid=2) ERROR {STAMP} [core.py:1] "
    lines = [header, "Traceback (most recent call last):"]
    for frame in frames:
        file, _, function = frame.partition(":")
        lines += [f'  File "/x/vllm/v1/{file}", line 9, in {function}', f"    self.{function}()"]
    return [prefix + line for line in (*lines, OOM)]


@pytest.mark.parametrize("frames", STAGES, ids=lambda frames: frames[-1])
def test_the_frames_tell_the_stage_of_an_out_of_memory_error(frames: tuple[str, ...]) -> None:
    found = classify(_traceback(frames, "EngineCore failed to start."), exit_code=1)
    assert (found.kind, found.phase) == (STAGES[frames], "startup")


def test_the_same_frames_while_serving_are_a_runtime_failure() -> None:
    found = fed([*SERVING, *_traceback(("gpu_worker.py:execute_model",), "EngineCore encountered a fatal error.")])
    assert found.verdict(exit_code=0).kind is Kind.OOM_RUNTIME


def test_a_worker_that_raises_is_the_cause_and_the_engine_cores_echo_is_not() -> None:
    worker = [
        line.replace("EngineCore pid=2", "Worker_TP1 pid=3") for line in _traceback((), "WorkerProc hit an exception.")
    ]
    echo = [
        f"(EngineCore pid=2) ERROR {STAMP} [core.py:1] EngineCore encountered a fatal error.",
        f"(EngineCore pid=2) ERROR {STAMP} [core.py:1] RuntimeError: Worker failed with error '{OOM}', please check",
    ]
    found = fed([*SERVING, *worker, *echo]).verdict(exit_code=0)
    assert found.kind is Kind.OOM_RUNTIME
    assert found.evidence[0].role == "Worker_TP1"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("of which 2.74 GiB is free. 5.53 GiB is reserved by PyTorch but unallocated", Kind.OOM_FRAGMENTATION),
        ("of which 2.74 GiB is free. 0.60 GiB is reserved by PyTorch but unallocated", Kind.OOM_RUNTIME),
        ("of which 14.71 GiB is free.", Kind.OOM_ENV_LIMIT),
    ],
)
def test_fragmentation_and_foreign_limits_are_told_by_the_numbers(text: str, kind: Kind) -> None:
    start = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.06 GiB."
    line = f"{start} GPU 0 has a total capacity of 15.56 GiB {text}"
    lines = [
        f"(EngineCore pid=2) ERROR {STAMP} [core.py:1] {x}" for x in ("EngineCore encountered a fatal error.", line)
    ]
    assert classify(lines).kind is kind


def test_processes_in_an_out_of_memory_message_are_split_into_own_and_foreign() -> None:
    told = "Including non-PyTorch memory, this process has 80.63 GiB memory in use."
    inside = f"{OOM} Process 1 has 59.11 GiB memory in use. {told}"
    assert {"own_gib": 80.63, "foreign_gib": 59.11}.items() <= classify([inside]).numbers.items()
    processes = "Process 1 has 79.29 GiB memory in use. Process 2 has 9.50 GiB memory in use."
    container = f"{OOM} {processes} Of the allocated memory 69.59 GiB is allocated by PyTorch"
    assert {"own_gib": 79.29, "foreign_gib": 9.5}.items() <= classify([container]).numbers.items()


def test_argparse_status_two_without_text_is_a_configuration_that_vllm_refuses() -> None:
    assert classify([], exit_code=2).kind is Kind.BAD_CONFIG


def test_status_one_without_text_is_unknown() -> None:
    found = classify(["something"], exit_code=1)
    assert (found.kind, found.change) == (Kind.UNKNOWN, ())


def test_no_lines_and_no_exit_is_nothing() -> None:
    assert Classifier().verdict().kind is Kind.NONE


# ---- bounded, linear, never raising

POOL = [line for path in sorted(CAPTURES.rglob("*.log"))[:6] + sorted(CORPUS.glob("*.log")) for line in raw_lines(path)]


@given(st.lists(st.one_of(st.binary(max_size=400), st.text(max_size=400)), max_size=40))
def test_random_lines_never_raise(lines: list[bytes | str]) -> None:
    classifier = Classifier(kernel_lines=True)
    for line in lines:
        classifier.feed(line)
    for ending in ({}, {"exit_code": 1}, {"exit_signal": 9}, {"exit_code": 0, "expected_stop": True}):
        classifier.verdict(**ending)  # type: ignore[arg-type]


@given(st.lists(st.sampled_from(POOL), max_size=60), st.data())
def test_mutated_real_lines_never_raise_and_evidence_stays_bounded(lines: list[bytes], data: st.DataObject) -> None:
    classifier = Classifier(kernel_lines=True)
    for number, line in enumerate(lines):
        cut = data.draw(st.integers(0, len(line))) if number % 3 == 0 else 0
        classifier.feed(line[cut:] + data.draw(st.binary(max_size=5)) + line[:cut])
    found = classifier.verdict(exit_code=data.draw(st.sampled_from([None, 0, 1, 2, 137])))
    assert all(len(item.text) <= EVIDENCE_TEXT for item in found.evidence)
    assert all(character.isprintable() or character == "\t" for item in found.evidence for character in item.text)
    assert 0 < found.confidence <= 1
    assert found.summary
    assert found.signature


def test_a_hostile_flood_of_distinct_errors_does_not_grow_the_classifier() -> None:
    classifier = Classifier()
    for number in range(5000):
        classifier.feed(f"(Worker_TP{number} pid={number}) ERROR {STAMP} [x.py:1] Traceback (most recent call last):")
        classifier.feed(f'(Worker_TP{number} pid={number}) ERROR {STAMP} [x.py:1]   File "x.py", line 1, in f')
        classifier.feed(f"(Worker_TP{number} pid={number}) ERROR {STAMP} [x.py:1] {OOM}")
        classifier.feed(f"(Worker_TP{number} pid={number}) ERROR {STAMP} [x.py:1] ValueError: number {number}")
    assert len(classifier._causes) <= MAX_CAUSES
    assert len(classifier._errors) <= MAX_ERRORS
    assert len(classifier._frames._streams) <= 64


def test_an_endless_line_is_cut() -> None:
    assert sum(len(part) for part in segments(b"x" * (10 * LIMIT))) == LIMIT
    assert [line.text for line in parse("", 1)] == [""]
    assert classify([b"y" * (10 * LIMIT) + FREE.encode()]).kind is Kind.NONE


def _unbounded(node: Any) -> list[Any]:  # noqa: ANN401 - the parser's tree is untyped
    """Every unbounded repeat below a parsed node; an unbounded repeat within another one is refused on the way."""
    found = []
    before = False
    for operation, argument in node:
        name = str(operation)
        endless = "REPEAT" in name and argument[1] == sre_parse.MAXREPEAT
        assert not (endless and before), "adjacent unbounded repeats"
        before = endless
        if "REPEAT" in name:
            inside = _unbounded(argument[2])
            assert not (endless and inside), "nested unbounded repeats"
            found += [argument] if endless else inside
        elif name == "SUBPATTERN":
            found += _unbounded(argument[3])
        elif name == "BRANCH":
            for branch in argument[1]:
                found += _unbounded(branch)
    return found


def _anything(argument: Any) -> bool:  # noqa: ANN401 - as above
    return any(str(operation) == "ANY" for operation, _ in argument[2])


def test_every_pattern_is_linear_time() -> None:
    checked = 0
    for signature in catalogue().signatures:
        for pattern in (*((signature.pattern,) if signature.pattern else ()), *signature.extract):
            repeats = _unbounded(sre_parse.parse(pattern.pattern))
            assert not any(_anything(repeat) for repeat in repeats), f"{signature.id}: `.*` has no bound"
            checked += 1
    assert checked > 100


# ---- the catalogue


def test_every_signature_of_a_cause_says_what_to_do_and_where_it_was_read() -> None:
    for signature in catalogue().signatures:
        assert signature.source, signature.id
        if signature.use in ("cause", "symptom") and not signature.staged:
            outcome = signature.outcome
            assert outcome is not None
            assert outcome.summary, signature.id
            assert outcome.advice, signature.id


def test_every_last_template_of_a_stage_can_be_rendered_without_numbers() -> None:
    for stage in catalogue().stages:
        assert render(stage.outcome.summary, {}), stage.outcome.id
        assert render(stage.outcome.advice, {}), stage.outcome.id


def test_the_last_stage_of_each_time_fits_everything() -> None:
    for when in ("startup", "runtime"):
        last = [stage for stage in catalogue().stages if stage.when == when][-1]
        assert (last.frames, last.within, last.phases) == ((), (), ())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[[signature]]\nid = 'x'\nuse = 'guess'\nanchor = 'a'", "guess"),
        (
            "[[signature]]\nid = 'x'\nuse = 'cause'\nanchor = 'a'\nkind = 'nope'\naction = 'wait'\nconfidence = 0.5",
            "nope",
        ),
        ("[[signature]]\nid = 'x'\nuse = 'wrapper'\nanchor = 'a'\npattern = '('", "x"),
        ("[[signature]]\nid = 'x'\nuse = 'wrapper'\nanchor = ''", "anchor"),
        ("[[signature]]\nid = 'x'\nuse = 'wrapper'\n", "anchor"),
        ("[[signature\n", "broken.toml"),
    ],
)
def test_a_wrong_signature_file_is_named_with_its_fault(text: str, fault: str) -> None:
    with pytest.raises(SignatureError, match=re.escape(fault)) as error:
        compile_catalogue([("broken.toml", text)])
    assert "broken.toml" in str(error.value)


def test_an_id_is_used_once() -> None:
    text = "[[signature]]\nid = 'x'\nuse = 'wrapper'\nanchor = 'a'\n"
    with pytest.raises(SignatureError, match="twice"):
        compile_catalogue([("a.toml", text), ("b.toml", text)])
