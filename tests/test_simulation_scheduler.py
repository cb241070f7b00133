"""The stand-in's scheduler: no block is lost or made, every request is answered, pressure shows as preemption."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from supervisord_vllm.simulation.ledger import BLOCK
from supervisord_vllm.simulation.scheduler import Request, Scheduler

REQUESTS = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=20)


def drain(scheduler: Scheduler) -> dict[str, int]:
    """Tokens that each request got until nothing is left to do."""
    got: dict[str, int] = {}
    began: list[str] = []
    for _ in range(20_000):
        if not scheduler.busy:
            assert sorted(began) == sorted(got), "each begins once, however often it is preempted"
            return got
        step = scheduler.step()
        assert step.tokens <= scheduler.max_tokens
        assert len(scheduler.running) <= scheduler.max_seqs
        assert scheduler.free + sum(request.blocks for request in scheduler.running) == scheduler.blocks
        began += step.admitted
        for name in step.advanced:
            got[name] = got.get(name, 0) + 1
    raise AssertionError("the requests are never answered")


@given(requests=REQUESTS, blocks=st.integers(17, 60), seqs=st.integers(1, 8), tokens=st.integers(8, 300))
def test_every_request_gets_its_tokens_and_gives_its_blocks_back(
    requests: list[tuple[int, int]], blocks: int, seqs: int, tokens: int
) -> None:
    scheduler = Scheduler(blocks, seqs, tokens)
    for number, (prompt, wanted) in enumerate(requests):
        scheduler.add(Request(str(number), prompt, wanted))
    assert drain(scheduler) == {str(number): wanted for number, (_, wanted) in enumerate(requests)}
    assert scheduler.free == blocks
    assert scheduler.admitted == len(requests)


def test_a_cache_that_is_too_small_for_all_preempts_and_one_that_is_not_does_not() -> None:
    counts = []
    for blocks in (12, 100):
        scheduler = Scheduler(blocks, 8, 512)
        for number in range(8):
            scheduler.add(Request(str(number), BLOCK, 4 * BLOCK))
        drain(scheduler)
        counts.append(scheduler.preemptions)
    assert counts[0] > 0
    assert counts[1] == 0


def test_an_aborted_request_frees_its_blocks_wherever_it_is() -> None:
    scheduler = Scheduler(20, 1, 512)
    for name in ("runs", "waits"):
        scheduler.add(Request(name, 10 * BLOCK, 50))
    scheduler.step()
    assert scheduler.usage == 0.5
    scheduler.abort("waits")
    scheduler.abort("runs")
    assert not scheduler.busy
    assert scheduler.free == 20
