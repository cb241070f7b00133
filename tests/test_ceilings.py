"""How high a lever may stand: the rung's bound, else what is declared, and what fits beside a neighbour."""

from __future__ import annotations

from supervisord_vllm.core.ceilings import ceilings
from supervisord_vllm.core.ledger import GIB, Room
from supervisord_vllm.core.levers import Levers, Rung
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import Launch, State

DECLARED = Levers({"gpu_memory_utilization": 900, "max_model_len": 8192, "max_num_seqs": 16, "enforce_eager": False})
POLICY = Policy(
    name="qwen",
    declared=DECLARED,
    ladder=(
        Rung("gpu_memory_utilization", min=700, max=950),
        Rung("max_num_seqs", min=4),
        Rung("enforce_eager"),
        Rung("max_num_batched_tokens", min=512, max=8192),
    ),
)


def test_a_rung_bounds_what_it_moves_and_what_has_none_has_no_ceiling() -> None:
    assert ceilings(POLICY, State()) == Levers(
        {"gpu_memory_utilization": 950, "max_num_seqs": 16, "max_num_batched_tokens": 8192}
    )


def test_a_neighbour_lowers_the_ceiling_of_the_utilization_only() -> None:
    room = Room("GPU-1", 80 * GIB, 60 * GIB)
    state = State(launch=Launch(2, DECLARED, DECLARED, 5, room=room))
    assert 700 < room.fits < 760
    assert ceilings(POLICY, state).number("gpu_memory_utilization") == room.fits
    assert ceilings(POLICY, state).number("max_num_seqs") == 16
    roomy = State(launch=Launch(2, DECLARED, DECLARED, 5, room=Room("GPU-1", 80 * GIB, 80 * GIB)))
    assert ceilings(POLICY, roomy).number("gpu_memory_utilization") == 950
