"""Long texts of vLLM 0.26 and torch 2.11 (H200 captures): configuration line, error messages, the list of routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from supervisord_vllm.simulation.ledger import Settings
from supervisord_vllm.simulation.quantity import gib, torch_size
from supervisord_vllm.simulation.shared_card import Holder

VERSION = "0.26.0"

LOGO = (
    "",
    "       █     █     █▄   ▄█",
    f" ▄▄ ▄█ █     █     █ ▀▄▀ █  version {VERSION}",
    "  █▄█▀ █     █     █     █  model   {model}",
    "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
    "",
)

_GET, _POST = "GET", "POST"
ROUTES = (
    ("/openapi.json", "GET, HEAD"),
    ("/docs", "GET, HEAD"),
    ("/docs/oauth2-redirect", "GET, HEAD"),
    ("/redoc", "GET, HEAD"),
    ("/load", _GET),
    ("/version", _GET),
    ("/health", _GET),
    ("/metrics", _GET),
    ("/tokenize", _POST),
    ("/detokenize", _POST),
    ("/v1/models", _GET),
    ("/ping", _GET),
    ("/ping", _POST),
    ("/invocations", _POST),
    ("/v1/chat/completions", _POST),
    ("/v1/chat/completions/batch", _POST),
    ("/v1/responses", _POST),
    ("/v1/responses/{response_id}", _GET),
    ("/v1/responses/{response_id}/cancel", _POST),
    ("/v1/completions", _POST),
    ("/v1/messages", _POST),
    ("/v1/messages/count_tokens", _POST),
    ("/generative_scoring", _POST),
    ("/scale_elastic_ep", _POST),
    ("/is_scaling_elastic_ep", _POST),
    ("/v1/chat/completions/render", _POST),
    ("/v1/completions/render", _POST),
    ("/v1/chat/completions/derender", _POST),
    ("/v1/completions/derender", _POST),
    ("/inference/v1/generate", _POST),
)
"""What "Available routes are" lists; only some of them are served here."""

_SPLITTING = [
    "unified_attention_with_output",
    "unified_mla_attention_with_output",
    "mamba_mixer2",
    "mamba_mixer",
    "short_conv",
    "linear_attention",
    "plamo2_mamba_mixer",
    "qwen_gdn_attention_core",
    "gdn_attention_core_xpu",
    "olmo_hybrid_gdn_full_forward",
    "kda_attention",
    "sparse_attn_indexer",
    "rocm_aiter_sparse_attn_indexer",
    "deepseek_v4_attention",
    "hpc_rope_norm_forward",
    "unified_kv_cache_update",
    "unified_mla_kv_cache_update",
]


def config_line(model: str, served: str, load_format: str, settings: Settings, prefix_caching: bool) -> str:
    """The resolved configuration as EngineCore prints it, on one line."""
    eager = settings.eager
    mode = "<CompilationMode.NONE: 0>" if eager else "<CompilationMode.VLLM_COMPILE: 3>"
    graphs = "<CUDAGraphMode.NONE: 0>" if eager else "<CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>"
    splitting = [] if eager else [f"vllm::{name}" for name in _SPLITTING]
    sizes = [] if eager else list(settings.capture_sizes)
    priority = "rms_norm=['vllm_c', 'native'], fused_add_rms_norm=['vllm_c', 'native']"
    if not eager:
        priority = "rms_norm=['native'], fused_add_rms_norm=['native']"
    return (
        f"model='{model}', speculative_config=None, tokenizer='{model}', skip_tokenizer_init=False, "
        f"tokenizer_mode=auto, revision=None, tokenizer_revision=None, trust_remote_code=False, dtype=torch.bfloat16, "
        f"max_seq_len={settings.max_model_len}, download_dir=None, load_format={load_format}, tensor_parallel_size=1, "
        f"pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1, dcp_comm_backend=ag_rs, "
        f"disable_custom_all_reduce=False, quantization={settings.quantization}, quantization_config=None, "
        f"enforce_eager={eager}, enable_return_routed_experts=False, kv_cache_dtype={settings.kv_cache_dtype}, "
        f"device_config=cuda, structured_outputs_config=StructuredOutputsConfig(backend='auto', "
        f"disable_any_whitespace=False, disable_additional_properties=False, reasoning_parser='', "
        f"reasoning_parser_plugin='', enable_in_reasoning=False), observability_config=ObservabilityConfig("
        f"show_hidden_metrics_for_version=None, otlp_traces_endpoint=None, collect_detailed_traces=None, "
        f"kv_cache_metrics=False, kv_cache_metrics_sample=0.01, cudagraph_metrics=False, "
        f"enable_layerwise_nvtx_tracing=False, enable_mfu_metrics=False, enable_mm_processor_stats=False, "
        f"enable_logging_iteration_details=False, jit_monitor_mode='warn', jit_monitor_verbose=False), seed=0, "
        f"served_model_name={served}, enable_prefix_caching={prefix_caching}, enable_chunked_prefill=True, "
        f"pooler_config=None, compilation_config={{'mode': {mode}, 'debug_dump_path': None, 'cache_dir': '', "
        f"'compile_cache_save_format': 'binary', 'backend': 'inductor', 'custom_ops': {['all' if eager else 'none']}, "
        f"'ir_enable_torch_wrap': {not eager}, 'splitting_ops': {splitting}, 'compile_mm_encoder': False, "
        f"'compile_sizes': [], 'compile_ranges_endpoints': [{settings.max_num_batched_tokens}], "
        f"'inductor_passes': {{}}, 'cudagraph_mode': {graphs}, 'cudagraph_num_of_warmups': {0 if eager else 1}, "
        f"'cudagraph_capture_sizes': {sizes}, 'cudagraph_copy_inputs': False, 'cudagraph_specialize_lora': True, "
        f"'use_inductor_graph_partition': False, 'max_cudagraph_capture_size': {max(sizes, default=0)}, "
        f"'local_cache_dir': None, 'fast_moe_cold_start': False, 'static_all_moe_layers': []}}, "
        f"kernel_config=KernelConfig(ir_op_priority=IrOpPriorityConfig({priority}), enable_flashinfer_autotune=True, "
        f"enable_cutedsl_warmup=True, enable_bf16x3_router_gemm=False, moe_backend='auto', linear_backend='auto')"
    )


def free_below_wish(free: int, total: int, utilization: float, requested: int) -> str:
    """The refusal of ``request_memory``."""
    return (
        f"ValueError: Free memory on device cuda:0 ({gib(free)}/{gib(total)} GiB) on startup is less than desired GPU "
        f"memory utilization ({utilization}, {gib(requested)} GiB). Decrease GPU memory utilization or reduce GPU "
        "memory used by other processes."
    )


_MORE = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."

NO_BLOCKS = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
    "the engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). " + _MORE
)
CANNOT_FIT_AUTO = (
    "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. "
    "Try increasing `gpu_memory_utilization`."
)


def too_long(length: int, needed: int, available: int, estimate: int) -> str:
    """The refusal of a length that one request could not use."""
    based = f"Based on the available memory, the estimated maximum model length is {estimate}. " if estimate else ""
    return (
        f"ValueError: To serve at least one request with the model's max seq len ({length}), ({gib(needed)} GiB KV "
        f"cache is needed, which is larger than the available KV cache memory ({gib(available)} GiB). {based}Try "
        "increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
        "`max_model_len` when initializing the engine. " + _MORE
    )


def profiling_race(initial: int, current: int) -> str:
    """The assertion that fails when a neighbour gives memory back during the profile run."""
    return (
        f"AssertionError: Error in memory profiling. Initial free memory {gib(initial)} GiB, current free memory "
        f"{gib(current)} GiB. This happens when other processes sharing the same container release GPU memory while "
        "vLLM is profiling during initialization. To fix this, ensure consistent GPU memory allocation or isolate "
        "vLLM in its own container."
    )


def out_of_memory(
    tried: int,
    total: int,
    free: int,
    pid: int,
    own: int,
    others: Sequence[Holder],
    outside: int,
    slack: int,
    pools: int,
) -> str:
    """Torch's message. Processes stand in the order of their pids (22: the neighbour first, 08: last). ``outside`` is
    this process's memory that torch does not know, ``slack`` what torch reserved and does not use, ``pools`` the
    graphs'."""
    sentences: list[tuple[int, str]] = [
        (holder.pid, f"Process {holder.pid} has {torch_size(holder.bytes)} memory in use. ") for holder in others
    ]
    sentences.append((pid, f"Including non-PyTorch memory, this process has {torch_size(own)} memory in use. "))
    used = "".join(text for _, text in sorted(sentences))
    private = f"with {torch_size(pools)} allocated in private pools (e.g., CUDA Graphs), " if pools else ""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {torch_size(tried)}. GPU 0 has a total "
        f"capacity of {torch_size(total)} of which {torch_size(free)} is free. {used}Of the allocated memory "
        f"{torch_size(max(0, own - outside - slack))} is allocated by PyTorch, {private}and {torch_size(slack)} is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def sampler_warm_up(requests: int) -> str:
    """What model runner V1 makes of an out-of-memory error in its sampler warm-up."""
    return (
        f"RuntimeError: CUDA out of memory occurred when warming up sampler with {requests} dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
    )


def validation_error(config: str, text: str, values: str = "'runner_t..., 'stream_interval': 1") -> Iterable[str]:
    """The lines of pydantic's refusal of a configuration."""
    return (
        f"pydantic_core._pydantic_core.ValidationError: 1 validation error for {config}",
        f"  Value error, {text} [type=value_error, input_value=ArgsKwargs((), {{{values}}}), input_type=ArgsKwargs]",
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
    )


ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
ENGINE_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
LONG_LEN = (
    " To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. "
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme caution. If the model uses relative position encoding "
    "(RoPE), positions exceeding derived_max_model_len lead to nan. If the model uses absolute position encoding, "
    "positions exceeding derived_max_model_len will cause a CUDA array out-of-bounds error."
)
