"""What is allowed but deserves a word."""

from __future__ import annotations

from collections.abc import Iterator

from supervisord_vllm.config import arguments
from supervisord_vllm.config.schema import PolicyFile
from supervisord_vllm.config.settings import Engine
from supervisord_vllm.config.tomlfile import KeyPath
from supervisord_vllm.config.units import Duration
from supervisord_vllm.config.values import LEVER_KEYS, VERBS

_TTFT = (
    1,
    5,
    10,
    20,
    40,
    60,
    80,
    100,
    250,
    500,
    750,
    1000,
    2500,
    5000,
    7500,
    10000,
    20000,
    40000,
    80000,
    160000,
    640000,
)
_INTER_TOKEN = (10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 2500, 5000, 7500, 10000, 20000, 40000, 80000)
_QUEUE = (300, 500, 800, 1000, 1500, 2000, 2500, 5000, 10000, 15000, 20000, 30000, 40000, 50000, 60000, 120000, 240000)
BUCKETS = {"ttft-p95": _TTFT, "inter-token-p95": _INTER_TOKEN, "queue-p95": _QUEUE}
"""Upper bounds of vLLM's histograms in milliseconds: a quantile is only known to lie between two of them."""


def warnings(file: PolicyFile, engine: Engine, *, readable: tuple[KeyPath, ...]) -> Iterator[tuple[KeyPath, str]]:
    """All of them, with their keys. ``readable`` are the keys of secret files that every user may read."""
    for key in readable:
        yield key, "every user of this machine may read the file; chmod 600 keeps the secret"
    if arguments.value(engine.args, "--api-key") is not None:
        yield ("engine", "args"), "an API key on the command line is seen by every user (ps); api-key-file keeps it off"
    if engine.url.startswith("https:") and file.engine.url is None and engine.verify_tls and engine.ca_file is None:
        yield (
            ("engine", "args"),
            f"the engine speaks TLS; set url to the name in its certificate (now {engine.url}) and ca-file",
        )
    if "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH" in engine.env:
        yield ("engine", "env"), "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH keeps a dead engine's server up; remove it"
    if file.levers.enforce_eager and any(rung.lever == "enforce_eager" for rung in file.ladder):
        yield ("levers", "enforce-eager"), "is declared already, so that its rung can do nothing"
    yield from _remedies(file)
    yield from _pressure(file)


def _remedies(file: PolicyFile) -> Iterator[tuple[KeyPath, str]]:
    movable = {rung.lever for rung in file.ladder}
    names = {lever: key for key, lever in LEVER_KEYS.items()}
    for kind, override in file.policy.items():
        for word in override.remedies or ():
            if word not in VERBS and word not in movable:
                yield ("policy", kind, "remedies"), f"{names[word]} has no rung in the ladder and will be skipped"


def _pressure(file: PolicyFile) -> Iterator[tuple[KeyPath, str]]:
    for key, buckets in BUCKETS.items():
        target: Duration | None = getattr(file.pressure, key.replace("-", "_"))
        if target is not None and target.ns not in {ms * 10**6 for ms in buckets}:
            near = min(buckets, key=lambda ms: abs(ms * 10**6 - target.ns))
            yield (
                ("pressure", key),
                f"{target} is no bound of vLLM's histogram, so that it cannot be told; {Duration(near * 10**6)} is",
            )
