"""What is learnt of lever vectors forbids exactly what is known to fail."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from supervisord_vllm.core import codec
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.levers import Levers, LeverValue, Weights
from supervisord_vllm.core.observations import LIFETIME_S, Known, Observation, forgiven, holding, noted

BIG, SMALL = Weights("m"), Weights("m-awq", "awq")
RANKS: dict[str, tuple[LeverValue, ...]] = {"weights": (BIG, SMALL), "kv_cache_dtype": ("auto", "fp8")}
GIB = 1 << 30


def vector(util: int = 900, seqs: int = 16, **more: LeverValue) -> Levers:
    return Levers({"gpu_memory_utilization": util, "max_model_len": 8192, "max_num_seqs": seqs, "weights": BIG, **more})


HIGH = Observation(vector(), "failed-high", Kind.OOM_RUNTIME)
LOW = Observation(vector(), "failed-low", Kind.KV_LEN_TOO_LONG)


def forbids(entry: Observation, levers: Levers) -> bool:
    return Known((entry,), RANKS).against(levers) is entry


def test_out_of_memory_forbids_what_asks_for_as_much_on_every_lever() -> None:
    assert forbids(HIGH, vector())
    assert forbids(HIGH, vector(950, 32))
    assert not forbids(HIGH, vector(850))
    assert not forbids(HIGH, vector(950, 8)), "fewer sequences may be enough"
    assert not forbids(HIGH, vector(enforce_eager=True))
    assert not forbids(HIGH, vector(weights=SMALL))


def test_a_shorter_length_frees_nothing_so_it_lifts_no_prohibition() -> None:
    assert forbids(HIGH, vector(max_model_len=1024))
    weights = Observation(vector(), "failed-high", Kind.OOM_WEIGHTS)
    assert forbids(weights, vector(100, 1, enforce_eager=True)), "weights are loaded before anything else"
    assert not forbids(weights, vector(weights=SMALL))


def test_too_small_a_cache_forbids_less_utilization_with_as_much_demand() -> None:
    assert forbids(LOW, vector(850))
    assert forbids(LOW, vector(900, 32))
    assert not forbids(LOW, vector(901))
    assert not forbids(LOW, vector(900, 8))
    assert not forbids(LOW, vector(900, max_model_len=4096))
    assert not forbids(LOW, vector(900, kv_cache_dtype="fp8"))
    blocks = Observation(vector(), "failed-low", Kind.KV_NO_BLOCKS)
    assert forbids(blocks, vector(900, max_model_len=4096)), "the length does not enter what was missing"


def test_a_cold_failure_of_the_cache_forbids_only_its_own_vector() -> None:
    cold = Observation(vector(), "failed-low", Kind.KV_LEN_TOO_LONG, cold=True)
    assert forbids(cold, vector())
    assert not forbids(cold, vector(850))


def test_what_is_proven_clears_only_its_own_vector() -> None:
    entries = noted(noted((), HIGH), Observation(vector(), "proven"))
    assert Known(entries, RANKS).against(vector()) is None
    both = noted(noted((), Observation(vector(950), "failed-high", Kind.OOM_RUNTIME)), Observation(vector(), "proven"))
    assert Known(both, RANKS).against(vector()) is None
    assert Known(both, RANKS).against(vector(950)) is not None
    assert Known(both, RANKS).proven(vector())


def test_a_failure_after_the_proof_counts_again() -> None:
    entries = noted(noted((), Observation(vector(), "proven")), HIGH)
    assert Known(entries, RANKS).against(vector()) == HIGH


def test_observations_age_and_belong_to_a_card_and_a_version() -> None:
    old = Observation(vector(), "failed-high", Kind.OOM_RUNTIME, wall_s=1000, setting="a")
    assert holding((old,), RANKS, 1000 + LIFETIME_S, "a").entries == (old,)
    assert holding((old,), RANKS, 1001 + LIFETIME_S, "a").entries == ()
    assert holding((old,), RANKS, 1000, "b").entries == ()
    assert holding((old,), RANKS, 1000, "").entries == (old,), "an unknown setting fits every other"


def test_running_out_of_memory_says_nothing_where_much_more_is_free() -> None:
    beside = Observation(vector(), "failed-high", Kind.OOM_CUDAGRAPH, free=60 * GIB)
    assert holding((beside,), RANKS, 0, "", free=60 * GIB).entries == (beside,)
    assert holding((beside,), RANKS, 0, "", free=120 * GIB).entries == ()
    assert holding((LOW,), RANKS, 0, "", free=120 * GIB).entries == (LOW,)


def test_a_reset_keeps_what_is_proven() -> None:
    proven = Observation(vector(800), "proven")
    assert forgiven((HIGH, proven, LOW)) == (proven,)


def test_an_observation_survives_the_store() -> None:
    seen = Observation(vector(), "failed-low", Kind.KV_NO_BLOCKS, 5, cold=True, setting="x", free=7)
    assert codec.from_json(Observation, codec.to_json(seen)) == seen


VECTORS = st.builds(
    vector,
    st.integers(1, 1000),
    st.integers(1, 512),
    max_model_len=st.integers(16, 131072),
    weights=st.sampled_from([BIG, SMALL]),
)


@given(VECTORS, VECTORS, VECTORS)
def test_demand_is_an_order(a: Levers, b: Levers, c: Levers) -> None:
    known = Known((), RANKS)
    assert known.demands(a, a)
    if known.demands(a, b) and known.demands(b, c):
        assert known.demands(a, c)
    if known.demands(a, b) and known.demands(b, a):
        assert a == b


@given(VECTORS, VECTORS)
def test_a_vector_that_asks_for_more_than_a_forbidden_one_is_forbidden_too(a: Levers, b: Levers) -> None:
    seen = Observation(a, "failed-high", Kind.OOM_RUNTIME)
    if Known((), RANKS).demands(b, a):
        assert forbids(seen, b)
