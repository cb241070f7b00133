"""Prometheus metrics, prefix ``vllm_supervise_``: gauges read from the snapshot, counters told by the daemon.

Levers whose values are names (weights, KV dtype) have no number and are not exported; booleans are 0 and 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from supervisord_vllm.api.control import Control
from supervisord_vllm.clock import SECOND_NS
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.ledger import requested
from supervisord_vllm.core.levers import LEVERS, UTILIZATION, Levers
from supervisord_vllm.core.proof import PARTS
from supervisord_vllm.core.relief import VERDICTS
from supervisord_vllm.core.state import StateName
from supervisord_vllm.proof_bars import percents
from supervisord_vllm.status import Snapshot
from supervisord_vllm.strain import Strained

PREFIX = "vllm_supervise_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
"""Bounds of the duration histograms: a small model on a CPU to a large one with a cold compile cache."""


class _Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def family(self, name: str, text: str) -> Metric:
        buckets, total = [], 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=self._sum)


class Exporter(Collector):
    """One daemon's metrics. The methods that count are called by the daemon, when it happens."""

    def __init__(self, control: Control, version: str) -> None:
        self._control = control
        self._version = version
        self._launches = 0
        self._failures: Counter[str] = Counter()
        self._decisions: Counter[tuple[str, str]] = Counter()
        self._proofs_failed: Counter[str] = Counter()
        self._starts = _Durations()
        self._recoveries = _Durations()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def launched(self) -> None:
        """Count a launch."""
        self._launches += 1

    def failed(self, kind: Kind) -> None:
        """Count a diagnosed failure."""
        self._failures[kind.value] += 1

    def proof_failed(self, part: str) -> None:
        """Count a proof that failed, by its part."""
        self._proofs_failed[part] += 1

    def decided(self, decision: Decision) -> None:
        """Count a decision."""
        self._decisions[decision.action.value, decision.kind.value] += 1

    def started(self, seconds: float) -> None:
        """Note how long a start took: spawn to answered canary."""
        self._starts.add(seconds)

    def recovered(self, seconds: float) -> None:
        """Note how long an outage took: from the failure to the next answered canary."""
        self._recoveries.add(seconds)

    def page(self) -> bytes:
        """Everything, in Prometheus' text form (see `CONTENT_TYPE`)."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask the daemon."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families of this moment."""
        snapshot = self._control.snapshot()
        yield from self._counted()
        state = _gauge("state", "1 for the state that the instance is in", ["state"])
        for name in StateName:
            state.add_metric([name.value], float(name.value == snapshot.state))
        yield state
        running = snapshot.launch.levers if snapshot.launch is not None else Levers()
        yield _levers("lever", "Levers of the running launch", running)
        yield _levers("declared_lever", "Levers asked for", snapshot.declared)
        yield _memory(snapshot)
        growth = _gauge(
            "memory_growth_bytes_per_second",
            "Growth of the engine's own memory over the last hours: estimate, and the bounds of 95 % confidence",
            ["gpu", "bound"],
        )
        for gpu, rate in sorted(snapshot.growth.items()):
            for bound, value in (("estimate", rate.per_hour), ("low", rate.low), ("high", rate.high)):
                growth.add_metric([gpu, bound], value / 3600)
        yield growth
        yield _single("held", "1 while an operator holds the configuration", float(snapshot.held))
        if snapshot.strained is not None:
            yield from _pressure(snapshot.strained)
        yield from _proof(snapshot.proof)
        yield _single("budget_remaining", "Same-again restarts left in the window", snapshot.budget_left)
        lost = CounterMetricFamily(f"{PREFIX}lost", "What could not be recorded, copied or used", labels=["what"])
        for what, count in sorted(snapshot.counters.items()):
            lost.add_metric([what], count)
        yield lost
        build = _gauge("build_info", "1, with the version", ["version"])
        build.add_metric([self._version], 1)
        yield build

    def _counted(self) -> Iterator[Metric]:
        launches = CounterMetricFamily(f"{PREFIX}launches", "Launches by this daemon")
        launches.add_metric([], self._launches)
        yield launches
        failures = CounterMetricFamily(f"{PREFIX}failures", "Diagnosed failures", labels=["kind"])
        for kind, count in sorted(self._failures.items()):
            failures.add_metric([kind], count)
        yield failures
        decisions = CounterMetricFamily(f"{PREFIX}decisions", "Decisions", labels=["action", "kind"])
        for labels, count in sorted(self._decisions.items()):
            decisions.add_metric(labels, count)
        yield decisions
        proofs = CounterMetricFamily(f"{PREFIX}proof_failures", "Proofs of a launch that failed", labels=["part"])
        for part in PARTS:
            proofs.add_metric([part], self._proofs_failed[part])
        yield proofs
        yield self._starts.family("start_duration_seconds", "From spawn to the first answered request")
        yield self._recoveries.family("recovery_seconds", "From a failure to the next answered request")


def _gauge(name: str, text: str, labels: list[str] | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels or [])


def _levers(name: str, text: str, levers: Levers) -> GaugeMetricFamily:
    family = _gauge(name, text, ["lever"])
    for lever, value in levers.items():
        if isinstance(value, int):
            family.add_metric([lever], value / 1000 if LEVERS[lever].kind == "per_mille" else value)
    return family


def _single(name: str, text: str, value: float) -> GaugeMetricFamily:
    """A gauge without labels."""
    family = _gauge(name, text)
    family.add_metric([], value)
    return family


def _pressure(strained: Strained) -> Iterator[Metric]:
    yield _single("pressure_loss_ratio", "Share of the service that is lost to slowness now, 0 to 1", strained.loss)
    yield _single(
        "pressure_lost_seconds", "Outage-equivalent seconds that slowness has cost in this episode", strained.lost_s
    )
    yield _single("pressure_worth_seconds", "Lost seconds at which a restart pays", strained.worth_s)
    verdict = _gauge("pressure_verdict", "1 for the resource that binds an engine that is too slow", ["verdict"])
    for name in VERDICTS:
        verdict.add_metric([name], float(name == strained.verdict))
    yield verdict
    target = _gauge("pressure_target_seconds", "Targets of the 95th percentile, declared or learnt", ["what"])
    pairs = (
        ("ttft", strained.targets.ttft_ns),
        ("inter_token", strained.targets.inter_token_ns),
        ("queue", strained.targets.queue_ns),
    )
    for what, ns in pairs:
        if ns is not None:
            target.add_metric([what], ns / SECOND_NS)
    yield target
    if strained.engines is not None:
        yield _single(
            "pressure_engines_needed", "Engines of this size that the load of five minutes needs", strained.engines
        )
    yield _single(
        "metrics_pages_missed", "Pages of the engine's /metrics in a row that could not be read", strained.missed
    )


def _proof(shown: Mapping[str, Any] | None) -> Iterator[Metric]:
    progress = _gauge("proof_progress_ratio", "How far the parts of the launch's proof are, 0 to 1", ["part"])
    first = _gauge(
        "proof_first_token_seconds", "First token of the proof's requests: canary, median of the burst", ["part"]
    )
    if shown is not None:
        for part, percent in percents(shown).items():
            progress.add_metric([part], percent / 100)
        for part in ("canary", "burst"):
            seconds = (shown[part] or {}).get("first_token_s")
            if seconds is not None:
                first.add_metric([part], seconds)
    yield progress
    yield first


def _memory(snapshot: Snapshot) -> GaugeMetricFamily:
    family = _gauge("memory_bytes", "Memory of a device: total, free, requested by the launch, own", ["gpu", "what"])
    utilization = None if snapshot.launch is None else snapshot.launch.levers.number(UTILIZATION)
    for device in snapshot.memory:
        family.add_metric([device.device, "total"], device.total_bytes)
        family.add_metric([device.device, "free"], device.free_bytes)
        family.add_metric([device.device, "own"], device.own_bytes)
        if utilization is not None:
            family.add_metric([device.device, "requested"], requested(utilization, device.total_bytes))
    return family
