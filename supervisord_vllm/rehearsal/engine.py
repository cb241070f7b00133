"""What a lever vector means on a simulated card: the model that is served and vLLM's settings for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from supervisord_vllm.core.levers import (
    BATCHED_TOKENS,
    KV_DTYPE,
    MODEL_LEN,
    NUM_SEQS,
    UTILIZATION,
    WEIGHTS,
    Levers,
    Weights,
)
from supervisord_vllm.simulation.card import Card, Model
from supervisord_vllm.simulation.ledger import ONLINE, Settings, default_capture_sizes
from supervisord_vllm.simulation.resolve import DEFAULT_UTILIZATION

SMALLER = ("awq", "gptq", "int4", "w4a16", "bnb", "4bit", "fp8", "int8", "w8a8")
QUARTER = ("awq", "gptq", "int4", "w4a16", "bnb", "4bit")


@dataclass(frozen=True, slots=True)
class Served:
    """A model of the card, and a note where the policy's model is not one of them."""

    model: Model
    note: str = ""


def served(card: Card, weights: Weights | None) -> Served:
    """The model that stands for a policy's weights: itself, or the card's first model, scaled by its name."""
    name = weights.model if weights is not None else ""
    if name in card.models:
        return Served(card.models[name])
    first = next(iter(card.models.values()))
    words = f"{name} {weights.quantization if weights else ''}".lower()
    if not any(word in words for word in SMALLER):
        return Served(first, f"The card has no {name}: {first.name} stands for it, so sizes are not yours.")
    share = 0.36 if any(word in words for word in QUARTER) else 0.55
    model = replace(first, name=name, weights=int(first.weights * share), quantization=words.split()[-1])
    return Served(model, f"The card has no {name}: {share:.0%} of {first.name}'s weights stand for it.")


def settings_of(card: Card, model: Model, levers: Levers) -> Settings:
    """The settings of a launch, with vLLM's defaults filled in."""
    device = card.device
    util = levers.number(UTILIZATION)
    seqs = levers.number(NUM_SEQS) or device.default_max_num_seqs
    tokens = levers.number(BATCHED_TOKENS) or device.default_max_num_batched_tokens
    weights = levers.get(WEIGHTS)
    method = weights.quantization if isinstance(weights, Weights) else None
    return Settings(
        utilization=DEFAULT_UTILIZATION if util is None else util / 1000,
        max_model_len=levers.number(MODEL_LEN) or model.max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        eager=levers.eager,
        quantization=method if method in ONLINE else None,
        kv_cache_dtype=str(levers.get(KV_DTYPE, "auto")),
        capture_sizes=default_capture_sizes(seqs, tokens, levers.number("max_cudagraph_capture_size")),
    )


def compiled_as(model: Model, settings: Settings) -> tuple[object, ...]:
    """What the torch.compile cache is keyed by: a change of it makes the next start cold."""
    return (
        model.name,
        settings.quantization,
        settings.kv_cache_dtype,
        settings.max_model_len,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
    )
