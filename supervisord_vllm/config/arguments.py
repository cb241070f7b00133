"""What an operator's own arguments say behind the policy's back: levers, the model, the address.

vLLM reads flags with argparse: ``_`` counts as ``-``, any unambiguous beginning of a flag is that flag, ``--no-X``
unsets a switch, ``--x=1`` and ``--x 1`` are the same, and ``--config FILE`` takes flags from a YAML file. All
spellings are seen here. A beginning that is ambiguous to vLLM counts too: vLLM would refuse it anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from supervisord_vllm.config.errors import ConfigError
from supervisord_vllm.config.tomlfile import read_text
from supervisord_vllm.core.levers import EAGER, LEVERS, UTILIZATION

QUANTIZATION = "quantization"
KV_BYTES = "kv_cache_memory_bytes"
HOST, PORT, MODEL = "host", "port", "model"

_MEANINGS = {
    **{spec.flag: name for name, spec in LEVERS.items() if spec.flag},
    "--device-memory-utilization": UTILIZATION,  # alias since 0.31
    "--no-enforce-eager": EAGER,
    "--kv-cache-memory-bytes": KV_BYTES,
    "--quantization": QUANTIZATION,
    "--host": HOST,
    "--port": PORT,
}
_EXACT = {"--model": MODEL, "--device": "", "--kv-cache-dtype-skip-layers": ""}
"""Flags of their own that begin another one (``--device`` until 0.9), or whose beginnings are other flags'
(``--model``).
"""

_GRAPHS = re.compile(r"max[_-]cudagraph[_-]capture[_-]size")
_YAML_KEY = re.compile(r"""^([ \t]*)(?:["']?)([A-Za-z][A-Za-z0-9_-]{0,80})["']?[ \t]*:""")
_YAML_INNER = re.compile(r"""(?<![A-Za-z0-9_-])([A-Za-z][A-Za-z0-9_-]{0,80})["']?[ \t]{0,8}:""")


@dataclass(frozen=True, slots=True)
class Meant:
    """One word of the arguments: its index, what it means (a lever or one of this module's names) and its spelling."""

    index: int
    meaning: str
    spelling: str


def meaning(word: str) -> str | None:
    """The lever, or other name of this module, that a word of a command line sets; ``None`` for anything else."""
    if word.startswith("-q") and not word.startswith("--"):
        return QUANTIZATION
    if not word.startswith("--") or len(word) == len("--"):
        return None
    flag = word.partition("=")[0].partition(".")[0].replace("_", "-")
    if flag in _EXACT:
        return _EXACT[flag] or None
    if flag in _MEANINGS:
        return _MEANINGS[flag]
    return next((name for full, name in _MEANINGS.items() if _abbreviates(flag, full)), None)


def _abbreviates(flag: str, full: str) -> bool:
    """Whether a flag is a beginning of another, as argparse takes it, or abbreviates each of its words.

    vLLM does not take the latter (``--gpu-mem-util``), but what the operator means is clear, and a launch is saved.
    """
    if full.startswith(flag):
        return len(flag) > len("--n")
    words, whole = flag[2:].split("-"), full[2:].split("-")
    return len(words) == len(whole) > 1 and all(
        len(word) > 1 and long.startswith(word) for word, long in zip(words, whole, strict=True)
    )


def meant(words: Sequence[str]) -> Iterator[Meant]:
    """Every word that sets something which the policy owns."""
    for index, word in enumerate(words):
        name = meaning(word)
        spelling = word.partition("=")[0]
        if name is None and _compilation(word) and _GRAPHS.search(" ".join(words[index : index + 2])):
            name, spelling = "max_cudagraph_capture_size", f"{spelling} with max_cudagraph_capture_size"
        if name is not None:
            yield Meant(index, name, spelling[:60])


def value(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag, as ``--flag X`` or ``--flag=X`` in either spelling; the last one counts, as in argparse."""
    found: str | None = None
    for index, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name.replace("_", "-") == flag:
            if equals:
                found = text
            elif index + 1 < len(words):
                found = words[index + 1]
    return found


def behind_yaml(words: Sequence[str], folder: Path) -> Iterator[tuple[Path, int, Meant]]:
    """The same for vLLM's own YAML file behind ``--config``: the file, the line and what is meant there.

    The scan needs no YAML library: it looks at keys alone, so that it sees block and flow style, and takes a key in a
    nested table for a lever only where it is spelled in full.

    Raises:
        ConfigError: where the file cannot be read; vLLM could not read it either.
    """
    name = value(words, "--config")
    if name is None:
        return
    path = folder / name
    for number, line in enumerate(read_text(path, "vLLM's YAML configuration").splitlines(), start=1):
        text = line.partition(" #")[0]
        if text.lstrip().startswith("#"):
            continue
        first = _YAML_KEY.match(text)
        if first and not first[1]:
            found = meaning("--" + first[2])
            if found is not None:
                yield path, number, Meant(0, found, first[2])
                continue
        for inner in _YAML_INNER.finditer(text):
            full = "--" + inner[1].replace("_", "-")
            found = _MEANINGS.get(full)
            if found in LEVERS or found == KV_BYTES:
                yield path, number, Meant(0, str(found), inner[1])


def _compilation(word: str) -> bool:
    flag = word.partition("=")[0].partition(".")[0].replace("_", "-")
    return flag == "-cc" or (len(flag) > len("--comp") - 1 and "--compilation-config".startswith(flag))


__all__ = [
    "HOST",
    "KV_BYTES",
    "MODEL",
    "PORT",
    "QUANTIZATION",
    "ConfigError",
    "Meant",
    "behind_yaml",
    "meaning",
    "meant",
    "value",
]
