"""The policy file as it is written: one model per table, strict types, kebab-case keys, defaults.

A model here knows nothing of other tables; what must hold between them is in `contradictions`. Every default that is
shown in config.example.toml stands here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from supervisord_vllm.config import values
from supervisord_vllm.config.units import Duration, duration, positive_duration, size
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.windows import Window

Text = Annotated[str, PlainValidator(values.filled)]
Filename = Annotated[str, PlainValidator(values.filled)]
Span = Annotated[Duration, PlainValidator(positive_duration)]
SpanOrZero = Annotated[Duration, PlainValidator(duration)]
Utilization = Annotated[int, PlainValidator(values.utilization)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Table(BaseModel):
    """What all tables share."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        alias_generator=lambda name: name.replace("_", "-"),
        protected_namespaces=(),
    )


class EngineTable(Table):
    """``[engine]``: how vLLM is started and reached."""

    model: Annotated[str, PlainValidator(values.model)]
    command: Annotated[list[str], PlainValidator(values.command)] = ["vllm", "serve"]
    quantization: Text | None = None
    args: Annotated[list[str], PlainValidator(values.words)] = []
    host: Text | None = None
    port: Port = 8000
    env: Annotated[dict[str, str], PlainValidator(values.environment)] = {}
    env_file: Filename | None = None
    working_dir: Filename | None = None
    url: Annotated[str, PlainValidator(values.url)] | None = None
    ca_file: Filename | None = None
    verify_tls: bool = True
    api_key_file: Filename | None = None


class LeversTable(Table):
    """``[levers]``: what is asked for; an absent lever is left to vLLM."""

    gpu_memory_utilization: Utilization | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    enforce_eager: bool | None = None
    kv_cache_dtype: Text | None = None
    limit_mm_per_prompt: Text | None = None
    max_cudagraph_capture_size: Count | None = None
    max_loras: Count | None = None
    max_lora_rank: Count | None = None


class RungTable(Table):
    """``[[ladder]]``: permission to move one lever. Numbers are checked where the lever's kind is known."""

    lever: Annotated[str, PlainValidator(values.lever)]
    step: int | float | None = None
    factor: float | None = None
    min: int | float | None = None
    max: int | float | None = None
    use: list[Any] | None = None


class OverrideTable(Table):
    """``[policy.KIND]``: the remedies of one kind."""

    remedies: Annotated[list[str], PlainValidator(values.remedies)] | None = None
    order: Literal["kind", "ladder"] = "kind"


class PressureTable(Table):
    """``[pressure]``: what is too slow."""

    ttft_p95: Span | None = None
    inter_token_p95: Span | None = None
    queue_p95: Span | None = None
    first_restart_cost: Span = Duration(60 * 10**9)


class ProofTable(Table):
    """``[proof]``: when a launch counts as proven."""

    canary: Literal["auto", "chat", "completions", "embeddings", "scoring"] = "auto"
    concurrency: Annotated[int, Field(ge=0, le=1024)] | None = None
    prompt_tokens: Count | None = None
    output_tokens: Count = 64
    burst_max: Span = Duration(300 * 10**9)
    soak: SpanOrZero = Duration(30 * 10**9)
    soak_memory: bool = True


class StepUpTable(Table):
    """``[step-up]``: the way back to what was declared."""

    after: Span = Duration(1800 * 10**9)
    window: Annotated[tuple[Window, ...], PlainValidator(values.windows)] = ()


class BackoffTable(Table):
    """``[restart] backoff``: the delay before a restart."""

    first: SpanOrZero = Duration(2 * 10**9)
    factor: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] = 2.0
    max: SpanOrZero = Duration(300 * 10**9)


class RestartTable(Table):
    """``[restart]``: bounds on activity."""

    budget: CountOrZero = 6
    window: Span = Duration(3600 * 10**9)
    max_launches: Count = 12
    planned_per_day: CountOrZero = 4
    backoff: BackoffTable = BackoffTable()


class GateTable(Table):
    """``[gate]``: what must hold before a launch, and how long it is waited for."""

    window: Span = Duration(2 * 10**9)
    patience: SpanOrZero = Duration(60 * 10**9)
    deadline: Span = Duration(600 * 10**9)


class StartTable(Table):
    """``[start]``: how long a start may take, and how long it may show no progress."""

    max: Span = Duration(3600 * 10**9)
    patience: Span = Duration(600 * 10**9)


class HangTable(Table):
    """``[hang]``: how long no progress is normal; ``None`` (``"auto"``): from the longest healthy gap."""

    patience: Annotated[Duration | None, PlainValidator(values.patience)] = None


class ServingTable(Table):
    """``[serving]``: what the service must be able to do."""

    min_concurrency: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0


class AllowTable(Table):
    """``[allow]``: what is done only where an operator says so."""

    expandable_segments: bool = False
    drop_caches: bool = False
    planned_recycle: bool = False


class MemoryTable(Table):
    """``[memory]``: where memory is read."""

    source: Annotated[str, PlainValidator(values.source)] = "auto"
    timeout: Span = Duration(5 * 10**9)


class HttpTable(Table):
    """``[http]``: our own HTTP."""

    listen: Annotated[str, PlainValidator(values.listen)] = "127.0.0.1:9620"

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port to listen on; ``None`` where HTTP is off."""
        if not self.listen:
            return None
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


class LogTable(Table):
    """``[log]``: our own events, and the engine's output."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"
    engine_output: bool = True
    keep_launch_bytes: Annotated[int, PlainValidator(values.log_bound)] = 256 * 2**20
    keep_launches: Count = 50
    keep_bytes: Annotated[int, PlainValidator(size)] = 2 * 2**30


class PollTable(Table):
    """``[poll]``: how often the engine is looked at."""

    health: Span = Duration(10**9)
    metrics: Span = Duration(5 * 10**9)


class StopTable(Table):
    """``[stop]``: how long each stage of an end may take."""

    grace: Span = Duration(30 * 10**9)
    interrupt: Span = Duration(5 * 10**9)
    terminate: Span = Duration(5 * 10**9)
    kill: Span = Duration(30 * 10**9)
    drain: SpanOrZero = Duration(300 * 10**9)


class SystemdTable(Table):
    """``[systemd]``: what READY=1 says."""

    ready: Literal["supervising", "engine"] = "supervising"


class PolicyFile(Table):
    """The whole file, its drop-ins, the environment and the flags, merged."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    name: Annotated[str, PlainValidator(values.name)] | None = None
    act: bool = True
    on_give_up: Literal["exit", "stay"] = "exit"
    state_dir: Filename | None = None
    runtime_dir: Filename | None = None
    engine: EngineTable
    levers: LeversTable = LeversTable()
    ladder: list[RungTable] = []
    policy: dict[str, OverrideTable] = {}
    pressure: PressureTable = PressureTable()
    proof: ProofTable = ProofTable()
    step_up: StepUpTable = StepUpTable()
    restart: RestartTable = RestartTable()
    gate: GateTable = GateTable()
    start: StartTable = StartTable()
    hang: HangTable = HangTable()
    serving: ServingTable = ServingTable()
    allow: AllowTable = AllowTable()
    memory: MemoryTable = MemoryTable()
    http: HttpTable = HttpTable()
    log: LogTable = LogTable()
    poll: PollTable = PollTable()
    stop: StopTable = StopTable()
    systemd: SystemdTable = SystemdTable()


KINDS = {kind.value.replace("_", "-"): kind for kind in Kind if kind is not Kind.NONE}
"""The kinds that ``[policy.KIND]`` may name."""


def fields(table: type[Table]) -> dict[str, Any]:
    """The keys of a table, as written, with the annotation of each."""
    return {str(info.alias): info.annotation for info in table.model_fields.values()}


def table_of(annotation: object) -> type[Table] | None:
    """The table that an annotation stands for, or holds as items; ``None`` for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation
    if get_origin(annotation) in {list, dict}:
        return table_of(get_args(annotation)[-1])
    return None


def every_key(table: type[Table] = PolicyFile, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every settable key with its annotation; a list or table of tables (``ladder``, ``policy``) is one key."""
    for key, annotation in fields(table).items():
        if isinstance(annotation, type) and issubclass(annotation, Table):
            yield from every_key(annotation, (*prefix, key))
        else:
            yield (*prefix, key), annotation
