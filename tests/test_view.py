"""The live view as text: what it says, that no line is wider than the screen, and that nothing can steer a terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from supervisord_vllm.cli.drawing import Pen, ended, fitted, rounded_up, shares, spark, wrapped
from supervisord_vllm.cli.paper import countdown
from supervisord_vllm.cli.timeline import ROWS, Timeline, drawn, joined, timeline
from supervisord_vllm.cli.view import Scene, view
from supervisord_vllm.clock import rfc3339
from supervisord_vllm.status import status_document
from test_status import SNAPSHOT, WALL

UNICODE, ASCII = Pen(), Pen(ascii=True)


def series(
    count: int = 180, every: float = 5.0, launch_age: float | None = None, **columns: list[Any]
) -> dict[str, Any]:
    ages = [every * (count - place - 1) for place in range(count)]
    begun = [] if launch_age is None else [{"number": 2, "age_s": launch_age}]
    points = {"age_s": ages, "launch": [1] * count, **columns}
    return {"schema": 1, "now": rfc3339(WALL), "every_s": every, "launches": begun, "points": points}


def status(**more: object) -> dict[str, Any]:
    ceilings = {"gpu_memory_utilization": 0.741, "max_model_len": 8192, "max_num_seqs": 64}
    return {**json.loads(json.dumps(status_document(SNAPSHOT))), "ceilings": ceilings, **more}


def shown(scene: Scene, width: int = 100, height: int = 50, pen: Pen = UNICODE) -> list[str]:
    return [line.plain for line in view(scene, width, height, pen)]


SERIES = series(
    launch_age=450.0,
    running=[16] * 85 + [None] * 10 + [16] * 85,
    waiting=[0] * 85 + [None] * 10 + list(range(85)),
    kv_usage=[0.25] * 85 + [None] * 10 + [0.99] * 85,
    ttft_p95_s=[0.3] * 85 + [None] * 10 + [7.8] * 85,
    inter_token_p95_s=[0.03] * 180,
    preemptions=[0] * 85 + [None] * 10 + [1] * 85,
    tokens_per_s=[1468.0] * 180,
)
EARLIER = {**status()["decision"], "number": 2, "sentence": "Launch 1 would not start.", "outcome": "decision 3"}


def test_a_person_sees_everything_on_one_screen() -> None:
    scene = Scene(status(), WALL, timeline(SERIES), [EARLIER, status()["decision"]])
    assert shown(scene, 80) == [
        "qwen: serving, ready, proven, below what was declared for 2 h       12:00:00 UTC",
        "next         nothing: it serves",
        "",
        "launch 2     pid 4123, started 2 h 1 min ago",
        "levers                                    declared           now       ceiling",
        "             gpu_memory_utilization          0.900         0.741         0.741",
        "             max_model_len                   8,192         8,192         8,192",
        "             max_num_seqs                       16            16            64",
        "GPU 0        █████████████████████████████████████████████████┃▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓░",
        "             █ ours 59.0 ▓ others 20.0 ░ free 1.0 ┃ requested 59.3 of 80.0 GiB",
        "             pid 2712 (python) holds 20.0 GiB",
        "",
        "last 15 min  what /metrics said; ┃ launch 2 7 min ago",
        "running      ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇ ┃▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇       16  most 16",
        "waiting      ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁ ┃▂▂▂▂▂▃▃▃▃▄▄▄▅▅▅▅▆▆▆▇▇       84  most 84",
        "KV cache     ▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃ ┃█████████████████████      99%  most 99%",
        "TTFT p95     ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂ ┃▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆    7.8 s  most 7.8 s",
        "inter-token  ▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅┃▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅    30 ms  most 30 ms",
        "preemptions  ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁ ┃█████████████████████       85  in all",
        "tokens/s     ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆┃▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆    1,468  most 1,468",
        "",
        "decision 3   2 h 13 min ago: Launch 1 was refused by vLLM; pid 2712 (python)",
        "             holds 20.00 GiB. Utilization 0.900 → 0.741. Outcome: launch 2",
        "             serves.",
        "decision 2   2 h 13 min ago: Launch 1 would not start. Outcome: decision 3.",
    ]


def test_a_terminal_without_unicode_gets_ascii() -> None:
    lines = shown(Scene(status(), WALL, timeline(SERIES)), 60, 60, ASCII)
    text = "\n".join(lines)
    assert text.isascii()
    assert "0.900 -> 0.741" in text
    assert "|" in next(line for line in lines if line.startswith("running"))
    assert max(map(len, lines)) <= 60


def test_a_low_screen_keeps_the_state_what_is_next_and_the_last_decision() -> None:
    scene = Scene(status(given_up="This card cannot run it."), WALL, timeline(SERIES), [EARLIER])
    for height in range(1, 30):
        assert len(shown(scene, 80, height)) <= height
    labels = [line[:11].strip() for line in shown(scene, 80, 10) if line[:1] != " "]
    assert labels == ["qwen: servi", "given up", "next", "launch 2", "last 15 min", "running", "waiting", "decision 3"]
    assert len(shown(scene, 80, 24)) >= 22
    assert any(line.startswith("running") for line in shown(scene, 80, 24))


def test_what_comes_next_is_counted_down() -> None:
    coming = {"what": "launch 3 after the back-off", "at": rfc3339(WALL + 42)}
    scene = Scene(status(state="backing-off", next=coming), WALL)
    assert "next         launch 3 after the back-off, at the latest in 0:42" in shown(scene)
    assert [countdown(s) for s in (-3, 0.5, 1, 61, 3725, 90_000)] == [
        "now",
        "now",
        "in 0:01",
        "in 1:01",
        "in 1:02:05",
        "in 25 h",
    ]


def test_without_a_daemon_it_says_so_and_claims_nothing_of_the_present() -> None:
    document = status(state="no-daemon", next={"what": "nothing"}, memory=[])
    lines = shown(Scene(document, WALL, trouble="no daemon listens at /run/x; trying again every 2 s"))
    assert lines[0].startswith("qwen: no daemon runs ")
    assert lines[1] == "!            no daemon listens at /run/x; trying again every 2 s"
    assert not any(line.startswith("next") for line in lines)


def test_what_is_unknown_is_a_gap_and_nought_is_not() -> None:
    assert spark([None, 0, 1, 10], frozenset(), None, UNICODE) == " ▁▂█"
    assert spark([None, 0, 1, 10], frozenset(), None, ASCII) == " _.#"
    assert spark([None, None], frozenset({1}), None, UNICODE) == " ┃"
    nothing = drawn(timeline(series(3, running=[None, None, None])), ROWS[0], 30, WALL, UNICODE)
    assert nothing == " " * 30


def test_pages_that_are_missing_longer_than_two_pauses_are_a_gap() -> None:
    document = series(180, running=[4] * 180)
    ages = document["points"]["age_s"]
    kept = [place for place, age in enumerate(ages) if not 300 <= age <= 600]
    document["points"] = {name: [column[place] for place in kept] for name, column in document["points"].items()}
    picture = drawn(timeline(document), ROWS[0], 45, WALL, UNICODE)  # 20 s a cell
    assert picture.count(" ") in range(14, 17)
    assert picture.strip(" ")[0] != " "
    wide = drawn(timeline(document), ROWS[0], 450, WALL, UNICODE)  # 2 s a cell: cells between two pages are no gap
    assert wide.strip(" ").count(" ") in range(145, 156)


def test_a_new_launch_is_a_mark_even_if_it_never_had_a_page() -> None:
    empty = timeline({"now": rfc3339(WALL), "launches": [{"number": 7, "age_s": 450}], "points": {"age_s": []}})
    assert drawn(empty, ROWS[0], 30, WALL, UNICODE).count("┃") == 1
    assert any("┃ launch 7 7 min ago" in line for line in shown(Scene(status(), WALL, empty)))


def test_the_picture_moves_by_whole_cells() -> None:
    line = timeline(series(180, waiting=[place % 7 for place in range(180)]))
    first = drawn(line, ROWS[1], 60, WALL + 1, UNICODE)
    assert {drawn(line, ROWS[1], 60, WALL + later, UNICODE) for later in (2, 5, 9, 14)} == {first}
    assert drawn(line, ROWS[1], 60, WALL + 16, UNICODE)[:-1] == first[1:]


def test_two_daemons_are_one_line() -> None:
    earlier = timeline(series(100, launch_age=300.0, running=[1] * 100))
    document = series(4, running=[2] * 4, waiting=[0] * 4)
    both = joined(earlier, timeline(document), WALL)
    assert list(both.at) == sorted(both.at)
    assert both.column("running") == (1,) * 96 + (2,) * 4
    assert both.column("waiting") == (None,) * 96 + (0,) * 4
    assert both.launches == earlier.launches
    assert joined(earlier, timeline({}), WALL).column("running") == (1,) * 100
    assert joined(Timeline(), earlier, WALL) == earlier
    assert not joined(earlier, timeline({}), WALL + 1000).at  # a view that stays for days remembers 15 minutes
    assert not joined(earlier, timeline({}), WALL + 1000).launches


def test_bars_fill_the_line_and_hide_nothing() -> None:
    assert shares([59, 20, 1], 67) == [50, 16, 1]
    assert shares([1, 0, 10_000], 20) == [1, 0, 19]
    assert shares([0, 0, 0], 20) == [0, 0, 0]
    assert shares([1, 1, 1], 2) in ([0, 1, 1], [1, 0, 1], [1, 1, 0])
    assert [rounded_up(value) for value in (0, 0.03, 5, 7.8, 84, 100)] == pytest.approx([0, 0.05, 5, 10, 100, 100])


def test_many_cards_take_one_line_each() -> None:
    (device,) = status()["memory"]
    scene = Scene(status(memory=[{**device, "gpu": f"GPU {number}", "holders": []} for number in range(8)]), WALL)
    cards = [line for line in shown(scene, 100) if line.startswith("GPU")]
    assert len(cards) == 8
    assert cards[0].endswith(" █ 59.0 ▓ 20.0 ░ 1.0 ┃ 59.3 of 80.0 GiB")


PROOF = {
    "part": "burst",
    "canary": {"percent": 100, "first_token_s": 0.2},
    "burst": {"percent": 31, "requests": 16, "done": 5, "yields": True, "ok": None},
    "soak": {"percent": 0, "seconds": 30.0},
}


def test_a_proof_under_way_is_three_bars() -> None:
    scene = Scene(status(state="proving", proof=PROOF), WALL)
    bars, yields = [line for line in shown(scene, 80) if line.startswith("proof") or "yields" in line]
    assert bars == "proof        canary ████████ 100%  burst ██░░░░░░ 5/16  soak ░░░░░░░░ 0%  "
    assert yields == "             the burst yields to real traffic"
    assert any("canary # 100%" in line for line in shown(scene, 56, pen=ASCII))
    assert not any(line.startswith("proof") for line in shown(Scene(status(proof={**PROOF, "part": None}), WALL)))
    small = {name: part for name, part in PROOF.items() if name != "burst"}
    assert "soak ░" in "".join(shown(Scene(status(proof={**small, "part": "soak", "burst": None}), WALL)))


PRESSURE = {
    "targets": {"ttft_p95_s": 5.0, "inter_token_p95_s": None, "queue_p95_s": None},
    "origin": "declared",
    "verdict": "kv",
    "curable": True,
    "loss": 0.697,
    "lost_s": 42.3,
    "worth_s": 60.0,
    "engines_needed": None,
    "judging": False,
}


def test_pressure_is_shown_on_its_way_to_a_restart() -> None:
    lines = shown(Scene(status(pressure=PRESSURE), WALL, timeline(SERIES)), 100)
    place = next(place for place, line in enumerate(lines) if line.startswith("pressure"))
    assert lines[place : place + 2] == [
        "pressure     ██████████████░░░░░░ 42 of 60 s",
        "             70% of the service is late now, bound by the KV cache; a restart pays at 60 s of outage",
    ]
    (row,) = (line for line in lines if line.startswith("TTFT"))
    assert row.endswith("7.8 s  most 7.8 s  target 5.0 s")


def test_pressure_that_nothing_helps_says_what_would() -> None:
    over = {**PRESSURE, "verdict": "compute", "curable": False, "engines_needed": 1.7}
    text = " ".join("\n".join(shown(Scene(status(pressure=over), WALL))).split())
    assert "bound by the card itself; no permitted change helps, 1.7 engines would" in text
    calm = shown(Scene(status(pressure={**PRESSURE, "lost_s": 0.0, "verdict": None}), WALL))
    assert not any(line.startswith("pressure") for line in calm)
    judged = shown(Scene(status(pressure={**PRESSURE, "judging": True}), WALL))
    assert any(line.startswith("pressure     the last change is being measured") for line in judged)


HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31mred\u202e\r\n\t\b" + "漢" * 40 + "e\u0301" * 20 + "x" * 500

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=True)
    | st.integers(-(2**70), 2**70)
    | st.text()
    | st.sampled_from([HOSTILE, rfc3339(WALL), "0001-01-01T00:00:00Z", "gating", "GPU-\x1b[1m"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def changed(document: object, draw: st.DrawFn) -> object:
    """The document with some of its values replaced by anything, or left out."""
    if isinstance(document, dict):
        pairs = [(key, changed(value, draw)) for key, value in document.items() if draw(st.integers(0, 15)) > 0]
        return dict(pairs)
    if draw(st.integers(0, 15)) == 0:
        return draw(ANYTHING)
    return [changed(value, draw) for value in document] if isinstance(document, list) else document


@st.composite
def documents(draw: st.DrawFn) -> tuple[Any, Any]:
    short = series(3, launch_age=4.0, running=[1, None, 2], waiting=[0, 0, 1], kv_usage=[0.5, 1.0, None])
    hold = {"by": "ada", "reason": HOSTILE, "since": rfc3339(WALL), "until": rfc3339(WALL + 60)}
    full = status(proof=PROOF, pressure=PRESSURE, hold=hold, way_back={"waits_for": HOSTILE, "at": rfc3339(WALL)})
    return changed(full, draw), changed(short, draw)


@settings(max_examples=60)
@given(documents() | st.tuples(st.dictionaries(st.text(), ANYTHING), ANYTHING), st.integers(0, 300), st.integers(0, 60))
def test_no_document_breaks_it_and_no_line_is_wider_than_the_screen(
    told: tuple[Any, Any], width: int, height: int
) -> None:
    document, points = told
    decision = document.get("decision")
    scene = Scene(document, WALL, timeline(points), [decision, {"sentence": HOSTILE}], HOSTILE)
    for pen in (UNICODE, ASCII):
        lines = shown(scene, width, height, pen)
        assert len(lines) <= height
        for line in lines:
            assert cell_len(line) <= width
            assert not any(ord(one) < 32 or 0x7F <= ord(one) < 0xA0 or one in "\u202e\u2028" for one in line)
            assert pen is UNICODE or line.isascii()


def test_names_that_differ_at_the_end_are_told_apart() -> None:
    assert ended("Qwen/Qwen2.5-7B-Instruct-AWQ", 19) == "..5-7B-Instruct-AWQ"
    assert ended("漢" * 20, 9) == ".." + "漢" * 3
    assert [ended("abcdef", width) for width in (0, 1, 2, 3, 6)] == ["", ".", "..", "..f", "abcdef"]


@given(st.text() | st.just(HOSTILE), st.integers(0, 40), st.integers(1, 5))
def test_text_is_cut_by_cells(text: str, width: int, most: int) -> None:
    clean = UNICODE.clean(text)
    assert cell_len(fitted(clean, width)) <= width
    lines = wrapped(clean, max(2, width), most)
    assert len(lines) <= most
    assert all(cell_len(line) <= max(2, width) for line in lines)
