"""The frames of vLLM 0.26's tracebacks, by the stage in which it failed (captures 04, 05, 06, 08, 12, 22, 24).

Frames of stages that no capture shows (profile run, warm-up, graph capture) have vLLM's function names and order, with
line numbers near those of the captures. Source lines are left out, as in the captures.
"""

from __future__ import annotations

from supervisord_vllm.simulation.console import PYTHON, SITE

HEADER = "Traceback (most recent call last):"


def frames(*blocks: str) -> list[str]:
    """Traceback lines of compact blocks; a line is ``path number function``, the path below vllm/ if it starts so."""
    lines = []
    for line in "\n".join(blocks).split("\n"):
        if not line.strip():
            continue
        path, number, function = line.split(maxsplit=2)
        if path.startswith("python/"):
            path = f"{PYTHON}/{path[7:]}"
        elif not path.startswith(("<", "/")) and path != "uvloop/loop.pyx":
            path = f"{SITE}/{path}"
        lines.append(f'  File "{path}", line {number}, in {function}')
    return lines


_CORE = """
vllm/v1/engine/core.py 1299 run_engine_core
vllm/tracing/otel.py 178 sync_wrapper
vllm/v1/engine/core.py 1065 __init__
"""
_EXECUTOR = """
vllm/v1/engine/core.py 125 __init__
vllm/tracing/otel.py 178 sync_wrapper
vllm/v1/executor/abstract.py 109 __init__
"""
_KV = """
vllm/v1/engine/core.py 136 __init__
vllm/tracing/otel.py 178 sync_wrapper
"""
_RPC = """
vllm/v1/executor/uniproc_executor.py 92 collective_rpc
vllm/v1/serial_utils.py 510 run_method
"""
_PROFILE = (
    _KV
    + """
vllm/v1/engine/core.py 278 _initialize_kv_caches
vllm/v1/executor/abstract.py 145 determine_available_memory
"""
    + _RPC
    + """
torch/utils/_contextlib.py 124 decorate_context
vllm/v1/worker/gpu_worker.py 507 determine_available_memory
vllm/v1/worker/gpu/model_runner.py 668 profile_run
torch/utils/_contextlib.py 124 decorate_context
"""
)
_FORWARD = """
torch/nn/modules/module.py 1779 _wrapped_call_impl
torch/nn/modules/module.py 1790 _call_impl
vllm/model_executor/models/qwen2.py 491 forward
"""
_AFTER_KV = (
    _KV
    + """
vllm/v1/engine/core.py 324 _initialize_kv_caches
vllm/v1/executor/abstract.py 126 initialize_from_config
"""
    + _RPC
    + """
vllm/tracing/otel.py 178 sync_wrapper
"""
)

STARTUP: dict[str, str] = {
    "init_device": _CORE
    + _EXECUTOR
    + """
vllm/v1/executor/uniproc_executor.py 63 _init_executor
vllm/v1/worker/worker_base.py 331 init_device
vllm/tracing/otel.py 178 sync_wrapper
vllm/v1/worker/gpu_worker.py 389 init_device
vllm/v1/worker/utils.py 435 request_memory
""",
    "loading": _CORE
    + _EXECUTOR
    + """
vllm/v1/executor/uniproc_executor.py 68 _init_executor
vllm/v1/worker/gpu_worker.py 431 load_model
vllm/v1/worker/gpu/model_runner.py 286 load_model
vllm/tracing/otel.py 178 sync_wrapper
vllm/model_executor/model_loader/base_loader.py 55 load_model
vllm/tracing/otel.py 178 sync_wrapper
vllm/model_executor/model_loader/utils.py 63 initialize_model
vllm/model_executor/models/qwen2.py 458 __init__
vllm/compilation/decorators.py 383 __init__
vllm/model_executor/models/qwen2.py 375 __init__
vllm/model_executor/models/utils.py 824 make_layers
vllm/model_executor/offloader/base.py 104 wrap_modules
vllm/model_executor/models/utils.py 825 <genexpr>
vllm/model_executor/models/qwen2.py 377 <lambda>
vllm/model_executor/models/qwen2.py 277 __init__
vllm/model_executor/models/qwen2.py 97 __init__
vllm/model_executor/layers/linear.py 1613 __init__
vllm/model_executor/layers/linear.py 201 create_weights
torch/utils/_device.py 116 __torch_function__
""",
    "profiling": _CORE + _PROFILE + "vllm/v1/worker/gpu/model_runner.py 604 _dummy_run\n" + _FORWARD,
    "profiling_sampler": _CORE + _PROFILE + "vllm/v1/worker/gpu/model_runner.py 643 _dummy_sampler_run\n",
    "memory_profiling": _CORE
    + _KV
    + """
vllm/v1/engine/core.py 278 _initialize_kv_caches
vllm/v1/executor/abstract.py 145 determine_available_memory
"""
    + _RPC
    + """
torch/utils/_contextlib.py 124 decorate_context
vllm/v1/worker/gpu_worker.py 531 determine_available_memory
""",
    "no_blocks": _CORE
    + _KV
    + """
vllm/v1/engine/core.py 297 _initialize_kv_caches
vllm/v1/core/kv_cache_utils.py 2132 get_kv_cache_configs
vllm/v1/core/kv_cache_utils.py 758 _check_enough_kv_cache_memory
""",
    "too_long": _CORE
    + _KV
    + """
vllm/v1/engine/core.py 297 _initialize_kv_caches
vllm/v1/core/kv_cache_utils.py 2132 get_kv_cache_configs
vllm/v1/core/kv_cache_utils.py 778 _check_enough_kv_cache_memory
""",
    "kv-alloc": _CORE
    + _KV
    + """
vllm/v1/engine/core.py 324 _initialize_kv_caches
vllm/v1/executor/abstract.py 123 initialize_from_config
"""
    + _RPC
    + """
vllm/v1/worker/worker_base.py 325 initialize_from_config
vllm/tracing/otel.py 178 sync_wrapper
vllm/v1/worker/gpu_worker.py 732 initialize_from_config
vllm/v1/worker/gpu/model_runner.py 504 initialize_kv_cache
vllm/v1/worker/gpu/attn_utils.py 531 init_kv_cache
vllm/v1/worker/gpu/attn_utils.py 186 _allocate_kv_cache
""",
    "warm-up": _CORE
    + _AFTER_KV
    + """
vllm/v1/worker/gpu_worker.py 834 compile_or_warm_up_model
torch/utils/_contextlib.py 124 decorate_context
vllm/v1/worker/gpu_model_runner.py 5871 _dummy_sampler_run
""",
    "capture": _CORE
    + _AFTER_KV
    + """
vllm/v1/worker/gpu_worker.py 812 compile_or_warm_up_model
vllm/v1/worker/gpu/model_runner.py 735 capture_model
vllm/v1/worker/gpu/cudagraph_utils.py 311 capture
"""
    + _FORWARD
    + """
vllm/compilation/cuda_graph.py 303 __call__
""",
}
"""Frames of EngineCore under "EngineCore failed to start.", by stage."""

RUNNING = (
    """
vllm/v1/engine/core.py 1323 run_engine_core
vllm/v1/engine/core.py 1364 run_busy_loop
vllm/v1/engine/core.py 1403 _process_engine_step
vllm/v1/engine/core.py 647 step_with_batch_queue
vllm/v1/executor/uniproc_executor.py 120 execute_model
python/concurrent/futures/_base.py 449 result
python/concurrent/futures/_base.py 401 __get_result
vllm/v1/executor/uniproc_executor.py 98 collective_rpc
vllm/v1/serial_utils.py 510 run_method
vllm/v1/worker/worker_base.py 351 execute_model
torch/utils/_contextlib.py 124 decorate_context
vllm/v1/worker/gpu_worker.py 1147 execute_model
torch/utils/_contextlib.py 124 decorate_context
vllm/v1/worker/gpu/model_runner.py 1361 execute_model
"""
    + _FORWARD
    + """
vllm/compilation/decorators.py 520 __call__
vllm/compilation/cuda_graph.py 254 __call__
vllm/compilation/piecewise_backend.py 380 __call__
torch/_inductor/output_code.py 656 __call__
"""
)
"""Frames of EngineCore under "EngineCore encountered a fatal error."."""

PROCESS = """
python/multiprocessing/process.py 314 _bootstrap
python/multiprocessing/process.py 108 run
vllm/v1/engine/core.py 1334 run_engine_core
"""
"""What stands before the frames when multiprocessing prints them once more."""

_SERVE = """
/opt/vllm/bin/vllm 8 <module>
vllm/entrypoints/cli/main.py 95 main
vllm/entrypoints/cli/serve.py 148 cmd
uvloop/__init__.py 96 run
python/asyncio/runners.py 194 run
python/asyncio/runners.py 118 run
uvloop/loop.pyx 1515 uvloop.loop.Loop.run_until_complete
uvloop/__init__.py 48 wrapper
"""
_CLIENT = (
    _SERVE
    + """
vllm/entrypoints/openai/api_server.py 759 run_server
vllm/entrypoints/openai/api_server.py 773 run_server_worker
python/contextlib.py 210 __aenter__
vllm/entrypoints/openai/api_server.py 139 build_async_engine_client
"""
)
_CONFIG = (
    _CLIENT
    + """
python/contextlib.py 210 __aenter__
vllm/entrypoints/openai/api_server.py 163 build_async_engine_client_from_engine_args
"""
)
SERVER: dict[str, str] = {
    "engine_failed": _CLIENT
    + """
python/contextlib.py 210 __aenter__
vllm/entrypoints/openai/api_server.py 175 build_async_engine_client_from_engine_args
vllm/v1/engine/async_llm.py 217 from_vllm_config
vllm/v1/engine/async_llm.py 146 __init__
vllm/tracing/otel.py 178 sync_wrapper
vllm/v1/engine/core_client.py 132 make_async_mp_client
vllm/tracing/otel.py 178 sync_wrapper
vllm/v1/engine/core_client.py 963 __init__
vllm/v1/engine/core_client.py 573 __init__
python/contextlib.py 144 __exit__
vllm/v1/engine/utils.py 1213 launch_core_engines
vllm/v1/engine/utils.py 1272 wait_for_engine_startup
""",
    "config": _CONFIG
    + """
vllm/engine/arg_utils.py 2181 create_engine_config
pydantic/_internal/_dataclasses.py 121 __init__
""",
    "model_config": _CONFIG
    + """
vllm/engine/arg_utils.py 2052 create_engine_config
vllm/engine/arg_utils.py 1790 create_model_config
pydantic/_internal/_dataclasses.py 121 __init__
""",
    "model_path": _CLIENT
    + """
vllm/engine/arg_utils.py 1776 from_cli_args
<string> 252 __init__
vllm/engine/arg_utils.py 808 __post_init__
vllm/transformers_utils/repo_utils.py 301 get_model_path
huggingface_hub/utils/_validators.py 85 _inner_fn
huggingface_hub/utils/_validators.py 133 validate_repo_id
""",
    "hub": _CONFIG
    + """
vllm/engine/arg_utils.py 2052 create_engine_config
vllm/engine/arg_utils.py 1790 create_model_config
pydantic/_internal/_dataclasses.py 121 __init__
vllm/config/model.py 470 __post_init__
vllm/transformers_utils/config.py 650 get_config
""",
    "port": _SERVE
    + """
vllm/entrypoints/openai/api_server.py 757 run_server
vllm/entrypoints/openai/api_server.py 731 setup_server
vllm/entrypoints/openai/api_server.py 664 create_server_socket
""",
    "interrupted": _CONFIG
    + """
vllm/v1/engine/async_llm.py 53 <module>
vllm/entrypoints/openai/api_server.py 753 _interrupt_init
""",
    "output_handler": """
vllm/v1/engine/async_llm.py 660 output_handler
vllm/v1/engine/core_client.py 1061 get_output_async
""",
    "stream": """
vllm/entrypoints/openai/completion/serving.py 309 completion_stream_generator
vllm/utils/async_utils.py 108 merge_async_iterators
vllm/v1/engine/async_llm.py 579 generate
vllm/v1/engine/output_processor.py 85 get
vllm/v1/engine/async_llm.py 660 output_handler
vllm/v1/engine/core_client.py 1061 get_output_async
""",
}
"""Frames of the API server."""
