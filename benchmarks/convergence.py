"""Convergence: launches until an engine serves, and the KV cache it then has, against blind rules and an oracle.

``python benchmarks/convergence.py [--cases 1000] [--first 0]`` draws cards, models, policies and failures, plays the
real core against each in virtual time, and prints a table. Every constant of the simulated engine (context, non-torch
memory, fixed activation, cold gap, graphs, sampler state, warm-up) is drawn anew for each case, so that no formula or
constant is shared with the core.

Rivals: (a) utilization 0.90 - 0.05 n; (b) 15 % off sequences and utilization; (c) half of the length; (d) an oracle
that makes the declared launch and then jumps to the best vector that the policy permits and that serves to the end.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from supervisord_vllm.core.levers import Levers, Rung, Weights
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import StateName
from supervisord_vllm.rehearsal.engine import served, settings_of
from supervisord_vllm.rehearsal.play import Play
from supervisord_vllm.simulation.card import Card, Device, Model, read_card
from supervisord_vllm.simulation.fault import Fault
from supervisord_vllm.simulation.virtual import Course, Neighbour, Neighbours, launch
from supervisord_vllm.simulation.virtual_scenario import Scenario

GIB, MIB = 1 << 30, 1 << 20
CARDS_GIB = (15.8, 22.0, 23.6, 31.5, 39.4, 44.5, 47.4, 79.1, 93.1, 139.8, 178.0)
SHAPES = (
    # layers, hidden, intermediate, heads, kv heads, vocabulary
    (28, 1536, 8960, 12, 2, 151936),
    (36, 2048, 11008, 16, 2, 151936),
    (32, 4096, 14336, 32, 8, 128256),
    (28, 3584, 18944, 28, 4, 152064),
    (48, 5120, 13824, 40, 8, 152064),
    (64, 5120, 27648, 40, 8, 152064),
    (80, 8192, 28672, 64, 8, 128256),
)
MOST = 12
HORIZON_S = 2 * 3600.0


@dataclass(frozen=True)
class Drawn:
    """One case: a policy and a scenario."""

    seed: int
    policy: Policy
    scenario: Scenario


@dataclass(frozen=True)
class Result:
    """Launches that were made, and the KV tokens of the one that serves at the end (0: none does)."""

    launches: int
    kv_tokens: int

    @property
    def serves(self) -> bool:
        """Whether an engine serves at the end."""
        return self.kv_tokens > 0


def draw(seed: int) -> Drawn:
    """A card, a model that has a chance on it, a policy and failures."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible draw, no secret
    base = read_card("h200")
    while True:
        total = int(rng.choice(CARDS_GIB) * rng.uniform(0.98, 1.0) * GIB)
        model = _model(rng)
        if model.weights < 1.05 * total and model.weights > 0.03 * total:
            break
    device = Device(
        "a drawn card", "GPU-0", total, 0, int(rng.uniform(0.3, 0.75) * GIB), 256, rng.choice((2048, 8192)), "9.0"
    )
    small = replace(model, name="alternative", weights=int(model.weights * rng.uniform(0.28, 0.6)), quantization="awq")
    card = Card(device, {model.name: model, small.name: small}, base.timing)
    policy = _policy(rng, model)
    return Drawn(seed, policy, _failures(rng, seed, card))


def _model(rng: random.Random) -> Model:
    layers, hidden, inter, heads, kv_heads, vocabulary = rng.choice(SHAPES)
    head = hidden // heads
    parameters = layers * (hidden * (heads + 2 * kv_heads) * head + heads * head * hidden + 3 * hidden * inter)
    weights = 2 * (parameters + 2 * vocabulary * hidden)
    warm = rng.uniform(20, 250)
    return Model(
        name="declared",
        architecture="Drawn",
        max_model_len=131072,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=inter,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head,
        vocab_size=vocabulary,
        weights=int(weights * rng.uniform(0.98, 1.03)),
        non_torch=int(rng.uniform(0.05, 0.6) * GIB),
        activation_fixed_eager=int((warm + rng.uniform(-20, 60)) * MIB),
        activation_fixed_warm=int(warm * MIB),
        activation_fixed_cold=int((warm + rng.uniform(10, 110)) * MIB),
        logits_fixed=int(rng.uniform(80, 300) * MIB),
        graphs_fixed=int(rng.uniform(30, 300) * MIB),
        graphs_each=int(rng.uniform(1, 7) * MIB),
        sequence_state=int(rng.uniform(20_000, 90_000)),
        warm_up_fixed=int(rng.uniform(20, 120) * MIB),
        warm_up_each_sequence=int(rng.uniform(0.4, 2.5) * MIB),
        quantization=None,
    )


def _policy(rng: random.Random, model: Model) -> Policy:
    util = rng.choice((850, 900, 900, 920, 950))
    length = rng.choice((4096, 8192, 16384, 32768, 65536, 131072))
    sequences = rng.choice((16, 32, 64, 128, 256))
    declared = Levers(
        {
            "gpu_memory_utilization": util,
            "max_model_len": length,
            "max_num_seqs": sequences,
            "weights": Weights(model.name),
        }
    )
    ladder = [
        Rung("gpu_memory_utilization", step=50, min=rng.choice((400, 500, 700)), max=max(util, rng.choice((950, 970)))),
        Rung("max_num_seqs", factor=0.5, min=4),
        Rung("max_model_len", min=2048),
        Rung("enforce_eager"),
    ]
    if rng.random() < 0.6:
        ladder.append(Rung("weights", use=(Weights("alternative"),)))
    return Policy(f"case-{seed_name(rng)}", declared, tuple(ladder), step_up_ns=24 * 3600 * SECOND)


def seed_name(rng: random.Random) -> str:
    """A name that is only for people."""
    return f"{rng.getrandbits(24):06x}"


def _failures(rng: random.Random, seed: int, card: Card) -> Scenario:
    total, neighbours = card.device.usable, []
    if rng.random() < 0.3:
        neighbours.append(Neighbour(0.0, int(total * rng.uniform(0.02, 0.35))))
    if rng.random() < 0.15:
        neighbours.append(Neighbour(rng.uniform(10, 1500), int(total * rng.uniform(0.02, 0.2)), pid=2713))
    faults = []
    if rng.random() < 0.1:
        faults.append(Fault(rng.choice(("die", "hang", "cuda-fault")), (1,), "running", after=rng.uniform(60, 900)))
    return Scenario(f"case-{seed}", "drawn", card, HORIZON_S, Neighbours(tuple(neighbours)), tuple(faults))


def core(case: Drawn) -> Result:
    """The real core."""
    play = Play(case.policy, case.scenario).run()
    serving = play.state.name in (StateName.SERVING, StateName.PROVING) and play.state.ready
    return Result(len(play.launches), play.kv_tokens if serving else 0)


def _try(case: Drawn, levers: Levers, number: int, at_s: float, *, cold: bool = False) -> Course:
    weights = levers.get("weights")
    model = served(case.scenario.card, weights if isinstance(weights, Weights) else None).model
    return launch(
        case.scenario.card,
        model,
        settings_of(case.scenario.card, model, levers),
        case.scenario.neighbours,
        start_s=at_s,
        cold=cold,
        faults=case.scenario.faults_of(number),
        horizon_s=HORIZON_S,
    )


def blind(case: Drawn, step: Callable[[Levers, int], Levers]) -> Result:
    """A rule that changes the levers after every failure, whatever it was; there is no gate and no diagnosis."""
    levers, at = case.policy.declared, 2.0
    for number in range(1, MOST + 1):
        course = _try(case, levers, number, at, cold=number == 1)
        if course.failure is None:
            return Result(number, course.kv_tokens)
        at = course.events[-1].at_s + 2.0
        if at > HORIZON_S:
            return Result(number, 0)
        levers = step(case.policy.declared, number)
    return Result(MOST, 0)


def _down(levers: Levers, number: int) -> Levers:
    return levers.with_(gpu_memory_utilization=max(50, 900 - 50 * number))


def _fifteen(levers: Levers, number: int) -> Levers:
    factor = 0.85**number
    util, sequences = levers.number("gpu_memory_utilization") or 900, levers.number("max_num_seqs") or 256
    return levers.with_(gpu_memory_utilization=int(util * factor), max_num_seqs=max(1, int(sequences * factor)))


def _half(levers: Levers, number: int) -> Levers:
    return levers.with_(max_model_len=max(16, (levers.number("max_model_len") or 8192) >> number))


def oracle(case: Drawn) -> Result:
    """The declared launch; if it does not serve to the end, the best permitted vector that does."""
    first = _try(case, case.policy.declared, 1, 2.0, cold=True)
    if first.failure is None:
        return Result(1, first.kv_tokens)
    after = first.events[-1].at_s + 4.0
    settled = max(after, *(one.since_s for one in case.scenario.neighbours.each), 0.0)
    kv = first.failure.kind.startswith("kv_")
    for levers in _vectors(case.policy, kv=kv):
        course = _try(case, levers, 2, settled)
        if course.failure is None:
            return Result(2, course.kv_tokens)
    return Result(1, 0)


def _vectors(policy: Policy, *, kv: bool) -> Iterator[Levers]:
    """Every permitted vector, the best first: the weights, graphs, length and sequences that were asked for, and of
    those the highest utilization; above the declared one only for a KV cache."""
    declared = policy.declared
    rung = policy.rung("gpu_memory_utilization")
    assert rung is not None
    most = (rung.max if kv else declared.number("gpu_memory_utilization")) or 900
    weights = policy.rung("weights")
    for which in (declared["weights"], *(weights.use if weights is not None else ())):
        for eager in (False, True):
            for length in _lengths(declared.number("max_model_len") or 8192):
                for sequences in _sequences(declared.number("max_num_seqs") or 256):
                    base = declared.with_(weights=which, max_model_len=length, max_num_seqs=sequences)
                    if eager:
                        base = base.with_(enforce_eager=True)
                    for util in range(most, (rung.min or 1) - 1, -4):
                        yield base.with_(gpu_memory_utilization=util)


def _lengths(declared: int) -> Iterator[int]:
    length = declared
    while length >= 2048:
        yield length
        length = length * 3 // 4 // 16 * 16


def _sequences(declared: int) -> Iterator[int]:
    yield declared
    yield max(4, declared // 4)
    yield 4


RIVALS: dict[str, Callable[[Drawn], Result]] = {
    "(a) utilization 0.90 − 0.05·n": lambda case: blind(case, _down),
    "(b) −15 % of sequences and utilization": lambda case: blind(case, _fifteen),
    "(c) half of the length": lambda case: blind(case, _half),
    "vllm-supervise": core,
    "(d) oracle": oracle,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="name the cases where the oracle did better")
    options = parser.parse_args()
    began = time.perf_counter()
    cases = [draw(seed) for seed in range(options.first, options.first + options.cases)]
    results = {name: [rival(case) for case in cases] for name, rival in RIVALS.items()}
    print(table(results))
    if options.show:
        for case, ours, best in zip(cases, results["vllm-supervise"], results["(d) oracle"], strict=True):
            worse = ours.launches > best.launches + 1 or ours.kv_tokens < 0.9 * best.kv_tokens
            if worse or (best.serves and not ours.serves):
                print(f"  case {case.seed}: ours {ours}, oracle {best}")
    print(f"\n{options.cases} cases in {time.perf_counter() - began:.0f} s")


def table(results: dict[str, list[Result]]) -> str:
    """Markdown: all cases that the oracle serves, and of those the ones in which the declared launch fails."""
    best = results["(d) oracle"]
    lines = [
        "| rule | serves | launches | launches, declared fails | KV of the oracle's | KV, declared fails |",
        "|---|---|---|---|---|---|",
    ]
    can = [place for place, one in enumerate(best) if one.serves]
    hard = [place for place in can if best[place].launches > 1]
    for name, mine in results.items():
        both, hard_both = [p for p in can if mine[p].serves], [p for p in hard if mine[p].serves]
        lines.append(
            f"| {name} | {len(both)}/{len(can)} | {_ratio(mine, best, can, 'launches')} |"
            f" {_ratio(mine, best, hard, 'launches')} | {_kv(mine, best, both)} | {_kv(mine, best, hard_both)} |"
        )
    lines.append("")
    served_ours = sum(one.serves for place, one in enumerate(results["vllm-supervise"]) if place not in set(can))
    lines.append(
        f"{len(best)} cases; the oracle serves {len(can)}, in {len(hard)} of them the declared launch fails;"
        f" vllm-supervise serves {served_ours} that the oracle's grid does not."
    )
    return "\n".join(lines)


def _ratio(mine: list[Result], best: list[Result], places: list[int], _what: str) -> str:
    ours, theirs = sum(mine[p].launches for p in places), sum(best[p].launches for p in places)
    return f"{ours / max(1, len(places)):.2f} ({ours / max(1, theirs):.2f} ×)"


def _kv(mine: list[Result], best: list[Result], places: list[int]) -> str:
    if not places:
        return "–"
    return f"{sum(min(2.0, mine[p].kv_tokens / best[p].kv_tokens) for p in places) / len(places):.3f}"


if __name__ == "__main__":
    main()
