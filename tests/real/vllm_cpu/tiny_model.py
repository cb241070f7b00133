"""Make a tiny random Qwen2 model: 2 layers, hidden size 128, 512 tokens, 736 KB, no hub.

Runs in vLLM's own environment (numpy, tokenizers). Usage: ``tiny_model.py DIR``
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LAYERS = 2
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
VOCABULARY = 512
POSITIONS = 4096
HEAD_SIZE = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = ["the quick brown fox jumps over the lazy dog", "system user assistant hello world how are you"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "use_sliding_window": False,
    "initializer_range": 0.02,
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer, trained on two lines, with a minimal chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": POSITIONS,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def tensors() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Random weights under the names of Qwen2; always the same ones."""
    random = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return random.standard_normal(shape).astype("<f4") * np.float32(0.05)

    ones = np.ones(HIDDEN, "<f4")
    made = {"model.embed_tokens.weight": weight(VOCABULARY, HIDDEN), "model.norm.weight": ones}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        made[at + "input_layernorm.weight"] = ones
        made[at + "post_attention_layernorm.weight"] = ones
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            made[f"{at}self_attn.{name}_proj.weight"] = weight(heads * HEAD_SIZE, HIDDEN)
            made[f"{at}self_attn.{name}_proj.bias"] = weight(heads * HEAD_SIZE)
        made[at + "self_attn.o_proj.weight"] = weight(HIDDEN, HEADS * HEAD_SIZE)
        made[at + "mlp.gate_proj.weight"] = weight(2 * HIDDEN, HIDDEN)
        made[at + "mlp.up_proj.weight"] = weight(2 * HIDDEN, HIDDEN)
        made[at + "mlp.down_proj.weight"] = weight(HIDDEN, 2 * HIDDEN)
    return made


def write_safetensors(path: Path) -> None:
    """The safetensors format by hand: length, JSON header, data; bf16 is the upper half of a float32."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset = 0
    for name, values in tensors().items():
        blob = (values.view("<u4") >> 16).astype("<u2").tobytes()
        end = offset + len(blob)
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [offset, end]}
        blobs.append(blob)
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(blobs))


def write_json(path: Path, value: object) -> None:
    """One JSON file."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def main(folder: Path) -> None:
    """Write the whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2})
    write_safetensors(folder / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
