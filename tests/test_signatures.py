"""The signatures as data: examples, bounds, whom they are believed from, the reference page, and drift."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from labelled import DATA
from supervisord_vllm.cli.signatures import signatures as verb
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.engine import defect, oom, stats
from supervisord_vllm.engine.circumstance import NOTE_IDS, RULES
from supervisord_vllm.engine.classifier import Classifier, classify
from supervisord_vllm.engine.drift import NoVllmError, verify
from supervisord_vllm.engine.frames import Frames
from supervisord_vllm.engine.numbers import NAMES
from supervisord_vllm.engine.reference import page
from supervisord_vllm.engine.signature import (
    Signature,
    catalogue,
    compile_catalogue,
    outside_verified,
    release,
    verified_range,
)

ALL = catalogue().signatures
CAUSES = [s for s in ALL if s.use in ("cause", "symptom")]
STAMP = "12-01 01:23:19"
START = f"(APIServer pid=1) INFO {STAMP} [api_utils.py:345] vLLM server version 0.32.0, serving model m"
ENGINE = f"(EngineCore pid=2) INFO {STAMP} [core.py:101] Initializing a V1 LLM engine (v0.32.0) with config: model='m'"
SERVING = [START, ENGINE, "INFO:     Application startup complete."]

NEVER_AT_INFO = ("note-workers-still-running", "note-cgroup-preflight")

app = typer.Typer()
app.command()(verb)


def ids(signature: Signature) -> str:
    return signature.id


@pytest.mark.parametrize("signature", ALL, ids=ids)
def test_every_signature_knows_its_example_and_refuses_its_counter_examples(signature: Signature) -> None:
    assert signature.anchor in signature.example
    assert signature.match(signature.example) is not None
    for text in signature.counter:
        assert signature.anchor not in text or signature.match(text) is None


def test_a_signature_that_an_info_record_may_carry_says_how_it_begins() -> None:
    """The fast path passes over INFO records by these beginnings, so none may be missing."""
    for signature in ALL:
        if signature.level == "any" and signature.use in ("phase", "ledger", "stats", "stopping", "note", "symptom"):
            # neither a record nor INFO: bare lines, other programs' lines, warnings
            never_info = signature.bare or signature.beside or signature.id in NEVER_AT_INFO
            assert signature.starts or never_info, signature.id


def test_every_printed_number_has_a_canonical_name() -> None:
    printed = {
        name
        for signature in ALL
        for pattern in (*((signature.pattern,) if signature.pattern else ()), *signature.extract)
        for name in pattern.groupindex
    }
    assert printed <= set(NAMES)
    contexts = {name for s in CAUSES if s.outcome for name in s.outcome.context}
    contexts |= {name for stage in catalogue().stages for name in stage.outcome.context}
    assert contexts <= set(NAMES)


def test_every_kind_can_be_told() -> None:
    told = {s.outcome.kind for s in CAUSES if s.outcome}
    told |= {stage.outcome.kind for stage in catalogue().stages} | {rule.outcome.kind for rule in RULES}
    told |= {oom.FRAGMENTATION.kind, oom.ENVIRONMENT_LIMIT.kind, stats.HUNG.kind, stats.KV_BOUND.kind}
    told |= {defect.BUG_SERVING.kind, defect.POISON.kind, Kind.NONE, Kind.UNKNOWN}
    # an orphan, shared memory and hangs are among them; `false_alarm` is how people label what we call `none`
    assert set(Kind) - told == {Kind.FALSE_ALARM}


def test_every_note_that_a_rule_shows_is_a_signature() -> None:
    assert set(NOTE_IDS) <= {s.id for s in ALL if s.use == "note"}


@pytest.mark.parametrize(
    "signature", [s for s in CAUSES if s.outcome and not s.frames and not s.beside and not s.starts], ids=ids
)
def test_the_example_from_an_engine_that_fails_to_start_gets_its_kind(signature: Signature) -> None:
    """Alone, and with the covers that follow it."""
    assert signature.outcome is not None
    lines = [
        START,
        f"(EngineCore pid=2) ERROR {STAMP} [core.py:1330] EngineCore failed to start.",
        f"(EngineCore pid=2) ERROR {STAMP} [core.py:1330] Traceback (most recent call last):",
        f"(EngineCore pid=2) ERROR {STAMP} [core.py:1330] {signature.example}",
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    found = classify(lines, exit_code=1)
    assert (found.kind, found.signature) == (signature.outcome.kind, signature.id)
    assert found.summary
    assert found.advice
    assert len(found.change) == len(signature.outcome.cures)


@pytest.mark.parametrize("signature", CAUSES, ids=ids)
def test_an_example_that_a_client_could_have_sent_is_no_cause(signature: Signature) -> None:
    """Quoted by the server, as an INFO record of anybody, and on a line of its own (a newline in a request)."""
    text = signature.example
    quoted = [
        f"(APIServer pid=1) INFO {STAMP} [logger.py:41] Received request cmpl-1: prompt: {text!r}",
        f"(APIServer pid=1) ERROR {STAMP} [serving.py:9] {text}",
        f"(APIServer pid=1) {text}",
        f"(EngineCore pid=2) INFO {STAMP} [core.py:9] {text}",
        f"INFO {STAMP} [core.py:9] {text}",
        text,
    ]
    for kernel_lines in (False, True):
        classifier = Classifier(kernel_lines=kernel_lines)
        for line in (*SERVING, *quoted):
            classifier.feed(line)
        found = classifier.verdict()
        if signature.level == "any" and not signature.bare:
            continue  # such a text is believed at INFO level, from the engine and the server alone
        assert not found.change, (signature.id, found)
        if not kernel_lines:  # a file may hold what people pasted beside the log; the daemon's never does
            assert found.action in (Action.NO_ACTION, Action.OBSERVE), (signature.id, found)


def test_texts_of_vllm_name_their_source_and_others_name_theirs() -> None:
    assert sum(s.vllms for s in ALL) >= 150
    assert all(s.source for s in ALL)


def test_frames_of_a_signature_are_needed() -> None:
    line = f"(EngineCore pid=2) ERROR {STAMP} [core.py:1] "
    frame = line + '  File "/x/vllm/v1/kv_offload/cpu/shared_offload_region.py", line 100, in __init__'
    end = [line + "OSError: [Errno 14] Bad address"]
    fatal = [line + "EngineCore failed to start.", line + "Traceback (most recent call last):"]
    assert classify([*fatal, frame, *end]).kind is Kind.SHM_EXHAUSTED
    assert classify([*fatal, *end]).kind is Kind.UNKNOWN
    assert Frames().of("nobody") == ()


def test_the_reference_page_is_what_the_signatures_say() -> None:
    written = (DATA.parent.parent / "docs" / "messages.md").read_text("utf-8")
    assert written == page(), "run `make messages`"


# ---- releases and drift


def test_versions_are_compared_as_numbers() -> None:
    assert release("0.26.1rc1.dev77+cu130") == (0, 26, 1)
    assert release("nightly") == ()
    first, last = verified_range()
    assert release(first) < release(last)


@pytest.mark.parametrize("version", ["0.6.0", "0.9.2", "0.33.0", "0.33.1", "0.26.1rc1.dev77", "dev", ""])
def test_a_verified_or_untold_release_is_no_news(version: str) -> None:
    assert outside_verified(version) is None


@pytest.mark.parametrize("version", ["0.5.4", "0.34.0", "1.0.0"])
def test_a_release_outside_of_the_verified_ones_is_said_in_a_sentence(version: str) -> None:
    said = outside_verified(version)
    assert said is not None
    assert version in said
    assert "0.6.0 to 0.33.0" in said


SIGNATURES = """
[[signature]]
id = "joined"
use = "wrapper"
anchor = "Free memory on device is less"
seen = "0.9.2..0.33"
source = "v1/worker/utils.py"
[[signature]]
id = "moved"
use = "wrapper"
anchor = "said differently now"
seen = "0.6..0.33"
source = "v1/worker/utils.py"
[[signature]]
id = "old"
use = "wrapper"
anchor = "only V0 said this"
seen = "0.6..0.10.2 (V0)"
source = "worker/worker.py"
[[signature]]
id = "theirs"
use = "wrapper"
anchor = "CUDA out of memory"
source = "torch"
"""


def tree(folder: Path, version: str = "0.30.0") -> Path:
    package = folder / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "envs.py").write_text("")
    (package / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    text = 'def f(x):\n    raise ValueError(f"Free memory on "\n        "device is less" f" than {x} GiB")\n'
    (package / "engine" / "core.py").write_text(text)
    (package / "engine" / "broken.py").write_text("def (:\n")
    return package


def test_drift_is_a_text_that_is_gone_within_its_range(tmp_path: Path) -> None:
    report = verify(tree(tmp_path), compile_catalogue([("s.toml", SIGNATURES)]))
    assert (report.version, report.checked) == ("0.30.0", 3)
    assert [gone.signature.id for gone in report.unexpected] == ["moved"]
    assert [gone.signature.id for gone in report.gone] == ["moved", "old"]


@pytest.mark.parametrize(("version", "unexpected"), [("0.8.5", {"moved", "old"}), ("0.40.0", set())])
def test_what_is_expected_depends_on_the_release(tmp_path: Path, version: str, unexpected: set[str]) -> None:
    report = verify(tree(tmp_path, version), compile_catalogue([("s.toml", SIGNATURES)]))
    assert {gone.signature.id for gone in report.unexpected} == unexpected


def test_a_folder_without_vllm_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(NoVllmError, match="give the folder of its package"):
        verify(tmp_path)
    result = CliRunner().invoke(app, ["verify", "--vllm", str(tmp_path)])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_the_verb_says_what_is_gone(tmp_path: Path) -> None:
    tree(tmp_path, "0.40.0")
    result = CliRunner().invoke(app, ["verify", "--vllm", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout.startswith("vLLM 0.40.0: ")
    assert "is outside of the releases whose messages were verified" in result.stdout
    data = json.loads(CliRunner().invoke(app, ["verify", "--vllm", str(tmp_path), "--json"]).stdout)
    assert (data["schema"], data["version"], data["verified"]) == (1, "0.40.0", list(verified_range()))
    assert data["checked"] == sum(s.vllms for s in ALL)
    tree(tmp_path / "b", "0.30.0")
    assert CliRunner().invoke(app, ["verify", "--vllm", str(tmp_path / "b"), "--exit-code"]).exit_code == 10
    assert CliRunner().invoke(app, ["explain", "--vllm", str(tmp_path)]).exit_code == 2
