"""The ``/metrics`` page with vLLM's series, labels and buckets (facts of 0.26's page; engine index 0)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_ITL = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FINISH = ("stop", "length", "abort", "error", "repetition")


class MetricsPage:
    """The series of one engine; ``cache`` are the labels of ``vllm:cache_config_info``."""

    def __init__(self, model_name: str, max_model_len: int, cache: Mapping[str, str]) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self.running = gauge("vllm:num_requests_running", "Number of requests in model execution batches.")
        self.waiting = gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.")
        labels = ["model_name", "engine", "reason"]
        text = "Number of waiting requests by reason."
        reason = Gauge("vllm:num_requests_waiting_by_reason", text, labels, registry=self._registry)
        self.waiting_for_capacity = reason.labels(reason="capacity", **self._labels)
        reason.labels(reason="deferred", **self._labels).set(0)
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        counter("vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.")
        counter("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.")
        self.preemptions = counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Number of prefill tokens processed.")
        self.generation_tokens = counter("vllm:generation_tokens", "Number of generation tokens processed.")
        labels = ["model_name", "engine", "finished_reason"]
        text = "Count of successfully processed requests."
        success = Counter("vllm:request_success", text, labels, registry=self._registry)
        self.success = {reason: success.labels(finished_reason=reason, **self._labels) for reason in _FINISH}
        sizes = _one_two_five(max_model_len)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Number of prefill tokens processed.", sizes)
        self.request_generation = histogram(
            "vllm:request_generation_tokens", "Number of generation tokens processed.", sizes
        )
        self.iteration_tokens = histogram(
            "vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", _ITERATION
        )
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TTFT
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _ITL
        )
        self.latency = histogram(
            "vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _LATENCY
        )
        self.queue_time = histogram(
            "vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", _LATENCY
        )
        info = Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            [*cache, "engine"],
            registry=self._registry,
        )
        info.labels(**cache, engine="0").set(1)

    def render(self) -> bytes:
        """The page in the Prometheus text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name", "engine"], registry=self._registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name", "engine"], registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, text, ["model_name", "engine"], registry=self._registry, buckets=buckets)
        return made.labels(**self._labels)


def _one_two_five(limit: int) -> list[float]:
    """VLLM's buckets for token counts: 1, 2, 5, 10, ... up to the longest request."""
    found: list[float] = []
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > limit:
                return found
            found.append(step * power)
        power *= 10
