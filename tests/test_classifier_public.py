"""The held-out logs: labelled before the classifier saw them, scored once (docs/diagnosis-proof.md has that table).

What is frozen here is that first score. It must not get worse, and the classifier must not be tuned to these logs: what
is missed is listed, not mended for its own sake.
"""

from __future__ import annotations

import hashlib

import pytest

import labelled
from labelled import PUBLIC, verdict
from supervisord_vllm.core.diagnosis import Action

LABELS = "53883aa444cf2ea566d2e3d864509ef7a72f6b2fa84a7d725441d8e1483d1840"
"""SHA-256 of labels.tsv as it was when the first score was taken."""
KINDS, ACTIONS, LEVERS, WITH_LEVER = 64, 65, 14, 16


def test_the_labels_are_those_of_the_first_score() -> None:
    assert hashlib.sha256((PUBLIC / "labels.tsv").read_bytes()).hexdigest() == LABELS
    assert len(labelled.labels(PUBLIC)) == 70


def test_the_first_score_stands(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = actions = levers = with_lever = 0
    for label in labelled.labels(PUBLIC):
        found = verdict(label.path)
        kinds += label.kind_right(found)
        actions += label.action_right(found)
        if label.action == Action.NEXT_CONFIG.value:
            with_lever += 1
            levers += label.lever_right(found)
    with capsys.disabled():
        print(f"\nheld out: kind {kinds}/70, action {actions}/70, lever {levers}/{with_lever}")
    assert (kinds, actions, levers, with_lever) >= (KINDS, ACTIONS, LEVERS, WITH_LEVER)


def test_no_false_alarm_of_theirs_changes_a_configuration() -> None:
    quiet = [label for label in labelled.labels(PUBLIC) if label.kind in ("false_alarm", "overload")]
    assert len(quiet) == 5
    for label in quiet:
        assert not verdict(label.path).change, label.path
