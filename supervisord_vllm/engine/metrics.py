"""vLLM's /metrics page as one frozen value.

Source of names: vLLM's ``v1/metrics/loggers.py`` and ``engine/metrics.py``; exposed counters end in ``_total`` in all
releases since 0.6; ``gpu_cache_usage_perc`` became ``kv_cache_usage_perc`` in 0.9.2. With several engines behind one
page (data parallel) counts are summed and the KV usage is the fullest engine's. A page is hostile text: what is not
understood is passed over, the work is linear in its length, and what is absent is ``None`` (``--disable-log-stats``
switches all ``vllm:`` series off).
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

_PREFIX = "vllm:"
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,4})?")
_COUNTS = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "num_preemptions_total": "preemptions_total",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generation_tokens_total",
    "request_success_total": "request_success_total",
}
_KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
_CACHE = "cache_config_info"
_SLEEP = "engine_sleep_state"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine says of itself: requests now, the share of KV blocks in use (0 to 1), counters since its start.

    ``request_success_total`` counts every finished request whatever the reason. ``kv_cache_tokens`` is the size of the
    KV cache in tokens; ``asleep`` a sleep mode of 0.11.2 and later. ``None``: this page does not say.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    preemptions_total: int | None = None
    prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    request_success_total: int | None = None
    kv_cache_tokens: int | None = None
    asleep: bool | None = None

    @property
    def known(self) -> bool:
        """Whether the page held any number of vLLM's."""
        return any(value is not None for value in asdict(self).values())

    def to_json(self) -> dict[str, Any]:
        """The ``load`` object of the status document."""
        return asdict(self)


def parse_metrics(page: str) -> EngineLoad:
    """Read a page in Prometheus' text form."""
    counts: dict[str, float] = {}
    usage: dict[str, float] = {}
    tokens: int | None = None
    asleep: bool | None = None
    for line in page.split("\n"):
        if not line.startswith(_PREFIX):
            continue
        name, labels, value = _sample(line[len(_PREFIX) :])
        if value is None:
            continue
        if name in _COUNTS:
            counts[_COUNTS[name]] = counts.get(_COUNTS[name], 0.0) + value
        elif name in _KV_USAGE:
            usage[name] = max(usage.get(name, 0.0), value)
        elif name == _CACHE:
            size = _cache_tokens(labels)
            tokens = tokens if size is None else size + (tokens or 0)
        elif name == _SLEEP and 'sleep_state="awake"' in labels:
            asleep = value == 0 or bool(asleep)
    return EngineLoad(
        kv_usage=next((usage[name] for name in _KV_USAGE if name in usage), None),
        kv_cache_tokens=tokens,
        asleep=asleep,
        **{name: round(value) for name, value in counts.items()},
    )


def _sample(line: str) -> tuple[str, str, float | None]:
    """``name{labels} value [timestamp]`` without its prefix; labels as text, the value ``None`` if it is no number."""
    brace = line.find("{")
    if brace < 0:
        name, _, rest = line.partition(" ")
        return name, "", _finite(rest)
    end = _end_of_labels(line, brace + 1)
    if end < 0:
        return "", "", None
    return line[:brace], line[brace + 1 : end], _finite(line[end + 1 :])


def _end_of_labels(line: str, start: int) -> int:
    """Where the ``}`` outside quotes stands, or -1; a label's value may hold braces and escaped quotes."""
    quoted = False
    at = start
    while at < len(line):
        character = line[at]
        if quoted and character == "\\":
            at += 1
        elif character == '"':
            quoted = not quoted
        elif character == "}" and not quoted:
            return at
        at += 1
    return -1


def _finite(text: str) -> float | None:
    words = text.split(None, 1)
    if not words or not _NUMBER.fullmatch(words[0]):
        return None
    value = float(words[0])
    return value if math.isfinite(value) else None


def _cache_tokens(labels: str) -> int | None:
    """``kv_cache_size_tokens`` (0.24 and later), else blocks times block size."""
    size = _label(labels, "kv_cache_size_tokens")
    if size is not None:
        return size
    blocks, block = _label(labels, "num_gpu_blocks"), _label(labels, "block_size")
    return None if blocks is None or block is None else blocks * block


def _label(labels: str, name: str) -> int | None:
    found = re.search(rf'(?:^|,){name}="([0-9]{{1,18}})"', labels)
    return None if found is None else int(found[1])
