"""The simulator's own account of vLLM 0.26's memory: a pure function of the card, the model and the engine's settings.

It shares no formula with the deciding core, or a simulator would prove itself. It adds what reality adds: the CUDA
context, printing with two decimals, the gap of 63 MiB between a cold and a warm compile cache, an activation that is
the larger of two lines, and memory that no profile run sees.

Where the constants come from (H200, captures 01, 02, 05, 06, 08, 09, 19, 22, 24, 30, 31; 03, 16 and 32 were held out):

* total 143,771 MiB, reserved 615 MiB: ``nvidia-smi`` totals in the captures' JSON. context 526 MiB: the one value that
  agrees with 139.29 (01), 98.77 of 101,670 MiB (04) and 16.58 of 17,500 MiB (20).
* KV = ceil(u * T) - N, N = weights + non-torch + activation; graphs are *not* in N (model runner V2 returns no
  estimate).
* activation of the forward pass = fixed + tokens * 2 bytes * (2 I + I + 3 H): the gate-up output, its activation and
  three hidden states live at once. 135,168 bytes a token for the 7B model; between 8,192 (01) and 32,768 tokens (08)
  135,034 were measured. The fixed part follows from the printed KV tokens: cold 99.7 MiB (01 and 06), warm 63 MiB less
  (02 - 01 = 72 blocks), eager 92.7 MiB (09 and 19).
* activation of the sampler = fixed + min(seqs, tokens) * (2 vocabulary + 2 H) bytes: bf16 logits and the hidden states;
  the fixed 177.3 MiB from 24, the only capture in which the logits are the peak.
* graphs = fixed + each * (piecewise + full captures): 0.143 GiB for 12 (01), 0.208 GiB for 30 (08).
* per sequence: vocab * 4 bytes of output counts + vocab / 8 bytes of prompt mask + 43,136 bytes, allocated before the
  KV cache and in no printed term (24: 135.20 GiB allocated = 14.32 + 27 layers of 4.10 + 10.23). After warm-up another
  1.8 MiB a sequence + 61 MiB stay (``gpu`` in the JSON of 09, 30, 31).
* fp8: the linear layers take one byte a weight instead of two, embedding and head stay; and an fp8 copy of the input of
  the down projection (I bytes a token) is live at the peak. Both from the architecture, not from a capture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from supervisord_vllm.simulation.card import Device, Model
from supervisord_vllm.simulation.quantity import MIB

BLOCK = 16
"""Tokens in a KV block."""
RESERVED_SLACK = 20 * MIB
"""What torch holds reserved but unallocated once the model is loaded (19.35 MiB in 08)."""
SUGGESTION_MARGIN = 150 * MIB
"""vLLM's own redundancy in the sizes that it suggests."""

ONLINE = {"fp8": 0.5, "fp8_per_tensor": 0.5}
"""Methods that quantise a bf16 checkpoint while loading, and what is left of a linear layer's bytes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine runs with, after vLLM's defaults were filled in."""

    utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eager: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    capture_sizes: tuple[int, ...] = ()
    kv_cache_memory_bytes: int | None = None
    auto_len: bool = False


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account, in bytes. ``kv`` may be negative, as vLLM prints it."""

    total: int
    requested: int
    weights: int
    activation: int
    non_torch: int
    graphs: int
    sequence_state: int
    kv: int
    block_bytes: int

    @property
    def blocks(self) -> int:
        """KV blocks that fit."""
        return max(0, self.kv // self.block_bytes)

    def needed(self, length: int) -> int:
        """Bytes of KV that one request of ``length`` tokens takes."""
        return math.ceil(length / BLOCK) * self.block_bytes

    def concurrency(self, length: int) -> float:
        """Requests of ``length`` tokens that the cache holds at once."""
        return self.blocks / math.ceil(length / BLOCK)

    def tokens(self, length: int) -> int:
        """What "GPU KV cache size" prints, which vLLM 0.24+ derives from the concurrency."""
        return int(self.concurrency(length) * length)

    def estimated_max_len(self) -> int:
        """The longest request that would fit: vLLM's "estimated maximum model length"."""
        return self.blocks * BLOCK


def account(device: Device, model: Model, settings: Settings, cold: bool, foreign_growth: int = 0) -> Ledger:
    """The account of one start.

    ``cold``: the torch.compile cache has nothing for this start. ``foreign_growth`` is what neighbours took during the
    profile run: 0.26 measures device-wide and charges it to this engine as non-torch memory.
    """
    total = device.usable
    requested = math.ceil(total * settings.utilization)
    weights = weights_bytes(model, settings.quantization)
    peak = activation(model, settings, cold)
    non_torch = model.non_torch + foreign_growth
    if settings.kv_cache_memory_bytes is not None:
        kv = settings.kv_cache_memory_bytes
    else:
        kv = requested - weights - peak - non_torch
    return Ledger(
        total=total,
        requested=requested,
        weights=weights,
        activation=peak,
        non_torch=non_torch,
        graphs=graph_bytes(model, settings),
        sequence_state=sequence_state(model, settings.max_num_seqs),
        kv=kv,
        block_bytes=BLOCK * kv_bytes_per_token(model, settings.kv_cache_dtype),
    )


def kv_bytes_per_token(model: Model, dtype: str = "auto") -> int:
    """Keys and values of all layers for one token."""
    return model.layers * model.kv_heads * model.head_size * 2 * (1 if dtype.startswith("fp8") else 2)


def layer_pieces(model: Model, quantization: str | None) -> tuple[int, ...]:
    """The tensors of one layer in the order they are created: qkv, output, gate-up and down projection."""
    ratio = ONLINE.get(quantization or "", 1.0)
    heads = (model.heads + 2 * model.kv_heads) * model.head_size
    parameters = (
        model.hidden_size * heads,
        model.heads * model.head_size * model.hidden_size,
        model.hidden_size * 2 * model.intermediate_size,
        model.intermediate_size * model.hidden_size,
    )
    full = tuple(2 * count for count in parameters)
    if (
        model.quantization is not None
    ):  # the checkpoint itself is smaller: share out what its size leaves for the layers
        whole = model.layers * sum(full)
        ratio = max(0.0, model.weights - 2 * _embedding(model)) / whole
    return tuple(round(size * ratio) for size in full)


def weights_bytes(model: Model, quantization: str | None) -> int:
    """What "Model loading took" prints."""
    if model.quantization is not None:
        return model.weights
    saved = sum(layer_pieces(model, None)) - sum(layer_pieces(model, quantization))
    return model.weights - model.layers * saved


def weight_pieces(model: Model, quantization: str | None) -> Iterator[int]:
    """The weights as they are allocated: embedding, layer by layer, the rest. The sum is `weights_bytes`."""
    left = weights_bytes(model, quantization)
    pieces = (_embedding(model), *layer_pieces(model, quantization) * model.layers)
    for piece in pieces:
        taken = min(piece, left)
        left -= taken
        yield taken
    yield left


def forward_pieces(model: Model, tokens: int, quantization: str | None) -> tuple[int, ...]:
    """What one forward pass over ``tokens`` holds at its peak, in the order of allocation."""
    hidden = 2 * model.hidden_size * tokens
    gate_up, activated = 4 * model.intermediate_size * tokens, 2 * model.intermediate_size * tokens
    copy = (model.intermediate_size * tokens,) if quantization in ONLINE else ()
    return (hidden, hidden, hidden, gate_up, activated, *copy)


def logits_bytes(model: Model, rows: int) -> int:
    """Logits and hidden states of ``rows`` sequences in the sampler."""
    return rows * 2 * (model.vocab_size + model.hidden_size)


def activation(model: Model, settings: Settings, cold: bool) -> int:
    """What "peak activation" prints: the larger of the forward pass and the sampler of the profile run."""
    if settings.eager:
        fixed = model.activation_fixed_eager
    else:
        fixed = model.activation_fixed_cold if cold else model.activation_fixed_warm
    forward = fixed + sum(forward_pieces(model, settings.max_num_batched_tokens, settings.quantization))
    rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    return max(forward, model.logits_fixed + logits_bytes(model, rows))


def sequence_state(model: Model, sequences: int) -> int:
    """Sampler state that is allocated for every possible sequence and counted nowhere."""
    return sequences * (model.vocab_size * 4 + model.vocab_size // 8 + model.sequence_state)


def warm_up_bytes(model: Model, sequences: int) -> int:
    """What the warm-up after the KV allocation leaves allocated."""
    return model.warm_up_fixed + sequences * model.warm_up_each_sequence


def default_capture_sizes(sequences: int, batched_tokens: int, largest: int | None = None) -> tuple[int, ...]:
    """VLLM's graph sizes: 1, 2, 4, by 8 up to 256, then by 16, up to min(2 * seqs, 512)."""
    limit = min(largest if largest is not None else min(2 * sequences, 512), batched_tokens)
    sizes = (1, 2, 4, *range(8, 257, 8), *range(272, max(limit, 512) + 1, 16))
    return tuple(size for size in sizes if size <= limit)


def capture_counts(settings: Settings) -> tuple[int, int]:
    """How many piecewise and full graphs are captured (full ones only up to the number of sequences)."""
    if settings.eager:
        return 0, 0
    return len(settings.capture_sizes), sum(1 for size in settings.capture_sizes if size <= settings.max_num_seqs)


def graph_bytes(model: Model, settings: Settings) -> int:
    """CUDA-graph memory; it comes on top of what was requested."""
    count = sum(capture_counts(settings))
    return model.graphs_fixed + count * model.graphs_each if count else 0


def suggestions(ledger: Ledger, free_at_start: int) -> tuple[int, int]:
    """The two ``--kv-cache-memory`` values of the summary line: to fit what was requested, to use the whole card."""
    taken = ledger.weights + ledger.activation + ledger.non_torch + ledger.graphs + SUGGESTION_MARGIN
    return ledger.requested - taken, free_at_start - taken


def _embedding(model: Model) -> int:
    return 2 * model.vocab_size * model.hidden_size
