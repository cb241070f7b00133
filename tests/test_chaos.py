"""25 seeded rounds of chaos on the daemon (`make chaos` runs 500): nothing escapes, nothing foreign is hurt."""

from __future__ import annotations

import pytest

from chaos.rounds import CAMPAIGN, play

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", range(1, 26, CAMPAIGN))
def test_rounds_of_chaos_leave_nothing_hurt_nobody_and_can_be_replayed(first: int) -> None:
    print(play(range(first, first + CAMPAIGN)))
