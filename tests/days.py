"""A seeded day of random failures in virtual time. As a script it prints one line per decision: `days.py SEED`."""

from __future__ import annotations

import json
import random
import sys

from supervisord_vllm.core.actions import Spawn
from supervisord_vllm.core.codec import to_json
from supervisord_vllm.core.diagnosis import Diagnosis, Evidence, Kind
from supervisord_vllm.core.ledger import GIB
from supervisord_vllm.core.levers import Levers, Rung, Weights
from supervisord_vllm.core.policy import Policy
from world import TOTAL, Outcome, World

DECLARED = Levers(
    {
        "gpu_memory_utilization": 900,
        "max_model_len": 8192,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,
        "weights": Weights("m"),
    }
)
LADDER = (
    Rung("gpu_memory_utilization", step=50, min=700, max=950),
    Rung("max_num_seqs", factor=0.5, min=4),
    Rung("max_model_len", min=4096),
    Rung("max_num_batched_tokens", factor=0.5, min=1024),
    Rung("enforce_eager"),
    Rung("weights", use=(Weights("m-awq", "awq_marlin"),)),
)
POLICY = Policy("day", DECLARED, LADDER)


def verdict(rng: random.Random, kind: Kind) -> Diagnosis:
    """A diagnosis with plausible numbers, some of them missing."""
    choices: dict[str, int | float | str] = {
        "tried_gib": round(rng.uniform(0.02, 6), 2),
        "free_gib": round(rng.uniform(0, 4), 2),
        "total_gib": 139.8,
        "available_kv_gib": round(rng.uniform(-9, 9), 2),
        "needed_kv_gib": round(rng.uniform(0, 20), 2),
        "estimated_max_len": rng.randrange(0, 9000),
        "max_model_len": 8192,
        "weights_gib": 14.3,
        "activation_gib": 1.13,
        "state_slots": rng.randrange(1, 16),
        "derived_max_model_len": 4096,
    }
    numbers = {name: value for name, value in choices.items() if rng.random() < 0.8}
    signature = f"{kind.value}-{rng.randrange(3)}"
    return Diagnosis(kind, numbers=numbers, evidence=(Evidence(1, "EngineCore", "boom"),), signature=signature)


def day(seed: int, policy: Policy = POLICY, hours: float = 24.0) -> World:
    """One day under random failures, neighbours and operators; the world asserts that there is one engine at most."""
    rng = random.Random(seed)

    def script(spawn: Spawn, world: World) -> Outcome:
        healthy = rng.choice([None, rng.uniform(5, 90)])
        fails = rng.choice([None, rng.uniform(1, 20_000)]) if healthy else rng.uniform(1, 120)
        return Outcome(
            healthy_s=healthy,
            numbers={"weights_gib": 14.32, "available_kv_gib": 100.0, "kv_tokens": 1_800_000},
            fails_s=fails,
            diagnosis=verdict(rng, rng.choice(list(Kind))),
            code=rng.choice([0, 1, 2]),
            canary=rng.random() < 0.9,
        )

    world = World(policy, script)

    def neighbours(world: World) -> None:
        if rng.random() < 0.05:
            world.foreign = rng.choice([0, 0, rng.randrange(0, TOTAL // 2), round(0.95 * TOTAL) - GIB])

    world.on_sample = neighbours
    for _ in range(rng.randrange(6)):
        world.command(rng.choice(["hold", "resume", "stop", "start", "start"]), rng.uniform(0, hours * 3600))
    return world.run(hours * 3600)


if __name__ == "__main__":
    for decision in day(int(sys.argv[1])).decisions:
        print(json.dumps(to_json(decision), sort_keys=True))
