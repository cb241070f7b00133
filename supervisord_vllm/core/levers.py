"""Levers: the knobs a policy may move, their values, bounds and couplings.

A lever is named as vLLM's flag in snake_case. Inside the core a utilization is an integer per mille, so that
``0.90 - 0.05`` is exact; JSON and the command line show it as a fraction (``0.85``). A lever that the operator did not
declare movable (no rung in the ladder) is never touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

UTILIZATION = "gpu_memory_utilization"
MODEL_LEN = "max_model_len"
NUM_SEQS = "max_num_seqs"
BATCHED_TOKENS = "max_num_batched_tokens"
EAGER = "enforce_eager"
WEIGHTS = "weights"
KV_DTYPE = "kv_cache_dtype"
MM_LIMITS = "limit_mm_per_prompt"

ValueKind = Literal["per_mille", "int", "bool", "str", "weights"]


@dataclass(frozen=True, slots=True)
class Weights:
    """Which checkpoint is served: a model name or path and, optionally, vLLM's ``--quantization`` method."""

    model: str
    quantization: str | None = None

    def __str__(self) -> str:
        return self.model if self.quantization is None else f"{self.model} ({self.quantization})"


LeverValue = int | bool | str | Weights


@dataclass(frozen=True, slots=True)
class LeverSpec:
    """What kind of value a lever takes and vLLM's flag for it (``None``: the weights, which are several flags)."""

    name: str
    kind: ValueKind
    flag: str | None


LEVERS: Mapping[str, LeverSpec] = {
    spec.name: spec
    for spec in (
        LeverSpec(UTILIZATION, "per_mille", "--gpu-memory-utilization"),
        LeverSpec(MODEL_LEN, "int", "--max-model-len"),
        LeverSpec(NUM_SEQS, "int", "--max-num-seqs"),
        LeverSpec(BATCHED_TOKENS, "int", "--max-num-batched-tokens"),
        LeverSpec(EAGER, "bool", "--enforce-eager"),
        LeverSpec(WEIGHTS, "weights", None),
        LeverSpec(KV_DTYPE, "str", "--kv-cache-dtype"),
        LeverSpec(MM_LIMITS, "str", "--limit-mm-per-prompt"),
        LeverSpec("max_cudagraph_capture_size", "int", "--max-cudagraph-capture-size"),
        LeverSpec("max_loras", "int", "--max-loras"),
        LeverSpec("max_lora_rank", "int", "--max-lora-rank"),
    )
}


class Levers(Mapping[str, LeverValue]):
    """An immutable, hashable vector of lever values; levers that are absent are left to vLLM's own default.

    Raises:
        ValueError: for a name that is not in `LEVERS`.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, LeverValue] | None = None) -> None:
        given = dict(values or {})
        for name in given:
            if name not in LEVERS:
                raise ValueError(f"unknown lever {name!r}; known are {', '.join(LEVERS)}")
        self._values = {name: given[name] for name in LEVERS if name in given}

    def __getitem__(self, name: str) -> LeverValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"Levers({self._values!r})"

    def with_(self, **changes: LeverValue) -> Levers:
        """A copy with some values replaced or added."""
        return Levers({**self._values, **changes})

    def number(self, name: str) -> int | None:
        """The value of a numeric lever (utilization in per mille), or ``None`` where it is not set."""
        value = self._values.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def eager(self) -> bool:
        """Whether ``--enforce-eager`` is set."""
        return self._values.get(EAGER) is True

    def to_json(self) -> dict[str, object]:
        """The public form: utilization as a fraction, weights as an object."""
        return {name: value_to_json(name, value) for name, value in self._values.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Levers:
        """The inverse of `to_json`."""
        return cls({name: value_from_json(name, value) for name, value in data.items()})


def value_to_json(name: str, value: LeverValue) -> object:
    """One lever's value as JSON shows it."""
    if isinstance(value, Weights):
        return {"model": value.model, "quantization": value.quantization}
    if LEVERS[name].kind == "per_mille":
        return int(value) / 1000
    return value


def value_from_json(name: str, value: object) -> LeverValue:
    """The inverse of `value_to_json`; a value of the wrong type raises ``ValueError``."""
    kind = LEVERS[name].kind if name in LEVERS else None
    if kind == "weights" and isinstance(value, Mapping):
        quantization = value.get("quantization")
        return Weights(str(value["model"]), None if quantization is None else str(quantization))
    if kind == "per_mille" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return round(value * 1000)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    raise ValueError(f"{value!r} is no value for the lever {name!r}")


def show(name: str, value: LeverValue | None) -> str:
    """One lever's value in a sentence: ``0.900``, ``8,192``, ``on``."""
    if value is None:
        return "vLLM's default"
    if isinstance(value, Weights):
        return str(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str):
        return value
    return f"{value / 1000:.3f}" if LEVERS[name].kind == "per_mille" else f"{value:,}"


@dataclass(frozen=True, slots=True)
class Rung:
    """Permission to move one lever, and how far.

    ``step`` (per mille for the utilization) and ``factor`` are for blind steps only; a computed value may be anything
    within ``min`` and ``max``. ``use`` lists the alternatives of a lever whose values are names (weights, KV dtype).
    """

    lever: str
    step: int | None = None
    factor: float | None = None
    min: int | None = None
    max: int | None = None
    use: tuple[Weights | str, ...] = ()


def couple(levers: Levers) -> Levers:
    """Lower what depends on what was lowered, so that vLLM does not refuse the vector.

    vLLM's own check: "max_num_batched_tokens (A) must be greater than or equal to max_num_seqs (B)".
    """
    seqs, tokens = levers.number(NUM_SEQS), levers.number(BATCHED_TOKENS)
    if seqs is not None and tokens is not None and seqs > tokens:
        return levers.with_(**{NUM_SEQS: tokens})
    return levers
