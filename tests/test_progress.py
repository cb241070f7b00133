"""When an engine counts as hung and a start as wedged: the rules, without an engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from supervisord_vllm.core.policy import SECOND
from supervisord_vllm.core.progress import CANARY_NS, Gaps, Progress, Scrape, StartWatch, patience_ns

MINUTE = 60 * SECOND
START = 1000 * SECOND


def at(seconds: float) -> int:
    return START + int(seconds * SECOND)


def page(seconds: float, work: int | None, busy: int = 0, prompts: int = 0) -> Scrape:
    return Scrape(at(seconds), work, prompts, busy)


def stuck(busy: int = 1) -> Progress:
    """Ten tokens came out, then nothing although requests wait."""
    progress = Progress(START).scraped(page(0, 0, busy)).scraped(page(5, 10, busy))
    for second in range(10, 66, 5):
        progress = progress.scraped(page(second, 10, busy))
    return progress


def test_no_token_for_the_patience_beside_waiting_requests_asks_for_one_token() -> None:
    progress = stuck()
    assert not progress.wants_canary(at(64))
    assert progress.wants_canary(at(65))


def test_silence_and_still_no_token_is_hung_but_only_by_a_later_page() -> None:
    progress = stuck().asked(at(65)).answered(at(95), "silent")
    assert progress.hung(at(95)) is None
    assert progress.scraped(page(94, 10, 1)).hung(at(95)) is None, "a page from before says nothing"
    text = progress.scraped(page(96, 10, 1)).hung(at(96))
    assert text is not None
    assert "no token came out for 91 s" in text


def test_a_token_during_the_canary_is_life() -> None:
    """A saturated engine keeps our request in its queue for longer than 30 s."""
    progress = stuck().asked(at(65)).scraped(page(70, 11, 1)).answered(at(95), "silent")
    assert progress.scraped(page(96, 11, 1)).hung(at(96)) is None
    late = stuck().asked(at(65)).answered(at(95), "silent").scraped(page(96, 12, 1))
    assert late.hung(at(96)) is None
    assert late.scraped(page(97, 12, 1)).hung(at(97)) is None, "it must be asked again first"


def test_what_is_answered_refused_or_asleep_is_not_hung_and_is_left_in_peace_for_a_while() -> None:
    for answer in ("answered", "refused", "asleep"):
        progress = stuck().asked(at(65)).answered(at(66), answer)
        assert progress.scraped(page(70, 10, 1)).hung(at(70)) is None
        assert not progress.scraped(page(70, 10, 1)).wants_canary(at(120))
        assert progress.scraped(page(70, 10, 1)).wants_canary(at(126))


def test_an_idle_engine_is_asked_every_five_minutes_unless_traffic_moves() -> None:
    idle = Progress(START).scraped(page(0, 10))
    assert not idle.scraped(page(299, 10)).wants_canary(at(299))
    assert idle.scraped(page(299, 10)).wants_canary(at(300))
    assert not idle.scraped(page(299, 11)).wants_canary(at(590))
    silent = idle.asked(at(300)).answered(at(330), "silent").scraped(page(331, 10))
    assert "gauges show nothing to do" in (silent.hung(at(331)) or "")


def test_busy_in_any_page_since_the_last_token_counts() -> None:
    progress = Progress(START).scraped(page(0, 5)).scraped(page(5, 5, 3)).scraped(page(10, 5, 0))
    assert progress.wants_canary(at(60))


def test_a_failed_scrape_is_no_evidence() -> None:
    progress = stuck().asked(at(65)).answered(at(95), "silent")
    assert progress.hung(at(1000)) is None


def test_pages_of_several_api_servers_that_differ_are_no_progress() -> None:
    progress = Progress(START).scraped(page(0, 100, 1))
    for second in range(5, 65, 5):
        progress = progress.scraped(page(second, 50 if second % 10 else 100, 1))
    assert progress.wants_canary(at(60))


def test_without_counts_silence_must_last_for_the_whole_patience() -> None:
    blind = Progress(START, fixed_ns=2 * MINUTE).scraped(page(0, None))
    assert blind.canary_ns(at(0)) == 2 * MINUTE
    assert Progress(START).scraped(page(0, 1)).canary_ns(at(0)) == CANARY_NS
    assert blind.asked(at(300)).answered(at(420), "silent").hung(at(420)) is not None


def test_the_patience_follows_the_longest_healthy_gap_within_bounds() -> None:
    now = at(0)
    assert patience_ns(None, Gaps(), None, now) == MINUTE
    assert patience_ns(None, Gaps().with_gap(now, 40 * SECOND, 0), None, now) == 2 * MINUTE
    assert patience_ns(None, Gaps().with_gap(now, 400 * SECOND, 0), None, now) == 5 * MINUTE
    assert patience_ns(None, Gaps().with_gap(now, 400 * SECOND, 40_000), 131_072, now) == 1200 * SECOND
    assert patience_ns(None, Gaps().with_gap(now, 400 * SECOND, 100), 131_072, now) == 5 * MINUTE, "too few to tell"
    assert patience_ns(7 * SECOND, Gaps().with_gap(now, 400 * SECOND, 0), None, now) == 7 * SECOND
    old = Gaps().with_gap(now, 400 * SECOND, 0)
    assert patience_ns(None, old, None, now + 25 * 60 * MINUTE) == MINUTE, "a day later it is forgotten"


def test_a_gap_that_ended_well_is_learnt_only_where_there_was_work() -> None:
    assert Progress(START).scraped(page(0, 0, 1)).scraped(page(50, 1)).patience_ns(at(50)) == 150 * SECOND
    assert Progress(START).scraped(page(0, 0)).scraped(page(50, 1)).patience_ns(at(50)) == MINUTE


steps = st.lists(
    st.tuples(
        st.integers(1, 100),
        st.one_of(st.none(), st.integers(0, 50)),
        st.integers(0, 3),
        st.sampled_from(["", "ask", "silent", "answered", "refused"]),
    ),
    max_size=40,
)


@given(steps, st.one_of(st.none(), st.integers(1, 600)))
def test_whatever_happens_hung_needs_a_silent_canary_and_no_work_since_it_was_asked(
    story: list[tuple[int, int | None, int, str]], fixed: int | None
) -> None:
    progress = Progress(START, fixed_ns=None if fixed is None else fixed * SECOND)
    now, silence, worked = START, False, 0
    for wait, work, busy, word in story:
        now += wait * SECOND
        before = progress.work
        progress = progress.scraped(Scrape(now, work, 0, busy))
        if before is not None and progress.work != before:
            silence, worked = False, now
        if word == "ask" and progress.asked_ns is None:
            progress = progress.asked(now)
        elif word in ("silent", "answered", "refused") and progress.asked_ns is not None:
            asked = progress.asked_ns
            progress = progress.answered(now, word)  # type: ignore[arg-type]
            if word == "silent":
                silence = silence or worked <= asked
        if progress.hung(now) is not None:
            assert silence
        assert progress.work is None or before is None or progress.work >= before


def test_equal_lines_after_removing_digits_are_no_progress() -> None:
    watch = StartWatch(START, 10 * MINUTE)
    for minute in range(1, 10):
        watch.line(at(60 * minute), f"No available shared memory broadcast block found in {60 * minute} seconds.")
        assert watch.wedged(at(60 * minute)) is None
    assert watch.wedged(at(659)) is None, "the first of them was new"
    assert "no new line" in (watch.wedged(at(660)) or "")


def test_loaded_shards_and_growing_caches_are_progress() -> None:
    watch = StartWatch(START, MINUTE)
    for shard in range(1, 5):
        watch.line(
            at(50 * shard), f"Loading safetensors checkpoint shards:  {25 * shard}% Completed | {shard}/4 [00:01]"
        )
        assert watch.wedged(at(50 * shard + 49)) is None
    watch.line(at(250), "Loading safetensors checkpoint shards:  100% Completed | 4/4 [00:09]")
    assert watch.wedged(at(260)) is not None
    for size, second in ((10, 255), (20, 256)):
        watch.grew(at(second), size)
    assert watch.wedged(at(260)) is None
    watch.grew(at(300), 15)
    assert watch.wedged(at(316)) is not None


def test_child_cpu_alone_extends_the_patience_once() -> None:
    watch = StartWatch(START, MINUTE)
    watch.cpu(50 * SECOND)
    assert watch.wedged(at(60)) is None
    watch.cpu(100 * SECOND)
    assert "uses the processor" in (watch.wedged(at(120)) or "")
    calm = StartWatch(START, MINUTE)
    calm.cpu(SECOND)
    assert "hardly any processor" in (calm.wedged(at(60)) or "")


@given(st.lists(st.tuples(st.integers(0, 300), st.text(max_size=300)), max_size=30))
def test_a_start_is_never_wedged_before_its_patience_is_over(lines: list[tuple[int, str]]) -> None:
    watch, now, last = StartWatch(START, 5 * MINUTE), START, START
    shapes: set[str] = set()
    for wait, text in lines:
        now += wait * SECOND
        shape = "".join(c for c in text[:200] if c not in "0123456789")
        watch.line(now, text)
        if shape not in shapes:
            last = now
        shapes.add(shape)
        assert watch.wedged(now + 1) is None or now + 1 - last >= 5 * MINUTE
