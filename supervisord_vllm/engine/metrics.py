"""vLLM's /metrics page as one frozen value, and what happened between two of them.

Read are the families that decisions and the status need, from vLLM 0.6 on; every other line is passed over unparsed.
Source of names: vLLM's ``engine/metrics.py`` and ``v1/metrics/loggers.py``. Exposed counters end in ``_total`` in all
releases; renamed were ``gpu_cache_usage_perc`` to ``kv_cache_usage_perc`` (0.9.2), ``time_per_output_token_seconds`` to
``inter_token_latency_seconds`` (0.10.2, both until 0.14) and ``time_in_queue_requests`` to
``request_queue_time_seconds`` (0.6.6, both until 0.8.5): where a page has both, the new name counts. Bounds of buckets
are the page's own, since ``--custom-histogram-buckets`` (0.32) replaces them.

Series of several engines (label ``engine``) and of several API servers are summed; the KV usage is the fullest
engine's. A page is hostile text: what is not understood is passed over, the work is linear in its length, and what is
absent is ``None``, or ``()`` for a histogram (``--disable-log-stats`` switches all ``vllm:`` series off).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from supervisord_vllm.core.pressure import Histogram, quantile

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
_RUNNING = "num_requests_running"
_KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
_CACHE = "cache_config_info"
_SLEEP = "engine_sleep_state"
_HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds_bucket",),
    "inter_token": ("inter_token_latency_seconds_bucket", "time_per_output_token_seconds_bucket"),
    "queue": ("request_queue_time_seconds_bucket", "time_in_queue_requests_bucket"),
}
"""The newest name first."""
_LENGTHS = ("request_prompt_tokens_bucket", "request_generation_tokens_bucket")
_BUCKETS = frozenset({*_LENGTHS, *(name for names in _HISTOGRAMS.values() for name in names)})
_BOUND = re.compile(r'(?:^|,)le="([^"]{1,40})"')
MOST_BOUNDS = 256
"""Buckets of one histogram; vLLM's largest default has 23."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine says of itself: requests now, the share of KV blocks in use (0 to 1), counters since its start.

    ``request_success_total`` counts every finished request whatever the reason. ``kv_cache_tokens`` is the size of the
    KV cache in tokens; ``asleep`` a sleep mode of 0.11.2 and later; ``engines`` how many engines (data parallel) the
    page sums up; ``longest_request`` a bound on the longest request since the engine's start, in tokens of prompt and
    output (the bounds of the highest buckets that hold any). ``None``: this page does not say. ``ttft``
    (request to first token), ``inter_token`` and ``queue`` are cumulative histograms in seconds since the engine's
    start, their last bound infinite; ``()``: this page has none.
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
    engines: int | None = None
    longest_request: int | None = None
    ttft: Histogram = ()
    inter_token: Histogram = ()
    queue: Histogram = ()

    @property
    def known(self) -> bool:
        """Whether the page held any number of vLLM's."""
        return any(getattr(self, entry.name) not in (None, ()) for entry in fields(self))

    @property
    def first_tokens_total(self) -> int | None:
        """Requests that got their first token since the engine's start."""
        return self.ttft[-1][1] if self.ttft else None

    def to_json(self) -> dict[str, Any]:
        """The ``load`` object of the status document: the numbers, without the histograms."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in _HISTOGRAMS}


@dataclass(frozen=True, slots=True)
class NoPage:
    """/metrics was asked for in vain, after so many seconds: no evidence of anything but itself.

    ``slow``: no answer in time. ``refused``: no connection, or it broke. ``status``: an HTTP status other than 200.
    """

    why: Literal["slow", "refused", "status"]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between two pages of one engine, ``seconds`` apart; gauges are those of the later page.

    Counts are differences; times are seconds, interpolated within the page's own buckets, ``None`` where nothing was
    observed. Quantiles below the lowest bound (vLLM's default: 1 ms first token, 10 ms between tokens, 300 ms queue)
    and above the highest cannot be told: they read as a part of the lowest and as the highest bound.
    """

    seconds: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    preemptions: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    finished: int | None = None
    first_tokens: int | None = None
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    inter_token_p50: float | None = None
    inter_token_p95: float | None = None
    queue_p95: float | None = None

    def rate(self, count: int | None) -> float | None:
        """A count of this interval a second."""
        return count / self.seconds if count is not None and self.seconds > 0 else None


_COUNTERS = ("preemptions_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total")


def was_reset(before: EngineLoad, after: EngineLoad) -> bool:
    """Whether a counter counts less than before: another engine, or the same started anew."""
    pairs = [(getattr(before, name), getattr(after, name)) for name in _COUNTERS]
    pairs += [(_total(getattr(before, name)), _total(getattr(after, name))) for name in _HISTOGRAMS]
    return any(old is not None and new is not None and new < old for old, new in pairs)


def between(before: EngineLoad, after: EngineLoad, seconds: float) -> Interval | None:
    """What happened from one page to a later one; ``None`` where the counters were reset in between."""
    if was_reset(before, after):
        return None

    def more(name: str) -> int | None:
        old, new = getattr(before, name), getattr(after, name)
        return None if old is None or new is None else new - old

    return Interval(
        seconds=seconds,
        running=after.running,
        waiting=after.waiting,
        kv_usage=after.kv_usage,
        preemptions=more("preemptions_total"),
        prompt_tokens=more("prompt_tokens_total"),
        generation_tokens=more("generation_tokens_total"),
        finished=more("request_success_total"),
        first_tokens=more("first_tokens_total"),
        ttft_p50=quantile(before.ttft, after.ttft, 0.5),
        ttft_p95=quantile(before.ttft, after.ttft, 0.95),
        inter_token_p50=quantile(before.inter_token, after.inter_token, 0.5),
        inter_token_p95=quantile(before.inter_token, after.inter_token, 0.95),
        queue_p95=quantile(before.queue, after.queue, 0.95),
    )


def parse_metrics(page: str) -> EngineLoad:
    """Read a page in Prometheus' text form."""
    counts: dict[str, float] = {}
    usage: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    tokens: int | None = None
    asleep: bool | None = None
    engines = 0
    start = len(_PREFIX)
    for line in page.split("\n"):
        if not line.startswith(_PREFIX):
            continue
        brace = line.find("{")
        name = line[start:brace] if brace >= 0 else line[start:].partition(" ")[0]
        if name not in _NEEDED:
            continue
        labels, value = _sample(line, brace)
        if value is None:
            continue
        if name in _BUCKETS:
            _count(buckets.setdefault(name, {}), labels, value)
        elif name in _COUNTS:
            counts[_COUNTS[name]] = counts.get(_COUNTS[name], 0.0) + value
            engines += name == _RUNNING
        elif name in _KV_USAGE:
            usage[name] = max(usage.get(name, 0.0), value)
        elif name == _CACHE:
            size = _cache_tokens(labels)
            tokens = tokens if size is None else size + (tokens or 0)
        elif 'sleep_state="awake"' in labels:
            asleep = value == 0 or bool(asleep)
    summed: dict[str, Any] = {name: round(value) for name, value in counts.items()}
    summed.update({name: _histogram(buckets, names) for name, names in _HISTOGRAMS.items()})
    return EngineLoad(
        kv_usage=next((usage[name] for name in _KV_USAGE if name in usage), None),
        kv_cache_tokens=tokens,
        asleep=asleep,
        engines=engines or None,
        longest_request=_longest(buckets),
        **summed,
    )


_NEEDED = frozenset({*_COUNTS, *_KV_USAGE, _CACHE, _SLEEP, *_BUCKETS})


def _sample(line: str, brace: int) -> tuple[str, float | None]:
    """Of ``name{labels} value [timestamp]`` the labels as text, and the value; ``None`` if it is no finite number."""
    if brace < 0:
        return "", _finite(line.partition(" ")[2])
    end = line.rfind("}")
    # Numbers hold no brace, so the last one closes the labels, if these are whole: quotes may hide it otherwise.
    if "\\" in line or not line.startswith(("{", '"', ","), end - 1) or line.count('"') % 2:
        end = _end_of_labels(line, brace + 1)
    if end < 0:
        return "", None
    return line[brace + 1 : end], _finite(line[end + 1 :])


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


def _count(found: dict[float, float], labels: str, value: float) -> None:
    """Add a bucket of one engine to those of the others."""
    matched = _BOUND.search(labels)
    if matched is None:
        return
    text = matched[1]
    bound = math.inf if text == "+Inf" else _finite(text)
    if bound is not None and (bound in found or len(found) < MOST_BOUNDS):
        found[bound] = found.get(bound, 0.0) + value


def _histogram(buckets: Mapping[str, Mapping[float, float]], names: tuple[str, ...]) -> Histogram:
    """The first of the names that the page has, in order of its bounds; one without an infinite bound is none."""
    found = next((buckets[name] for name in names if name in buckets), {})
    if math.inf not in found:
        return ()
    return tuple((bound, round(found[bound])) for bound in sorted(found))


def _longest(buckets: Mapping[str, Mapping[float, float]]) -> int | None:
    """The highest occupied buckets of prompt and output together; ``None`` where one of them is not bounded."""
    tokens = 0
    for name in _LENGTHS:
        found = buckets.get(name, {})
        count = found.get(math.inf, 0.0)
        bound = min((bound for bound, under in found.items() if under >= count), default=math.inf)
        if count <= 0 or bound == math.inf:
            return None
        tokens += round(bound)
    return tokens


def _total(histogram: Histogram) -> int | None:
    return histogram[-1][1] if histogram else None


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
