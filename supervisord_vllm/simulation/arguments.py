"""vLLM's command line as far as operators use it, with argparse's behaviour: ``-`` and ``_`` are equal, unambiguous
abbreviations are taken, an unknown flag ends with ``vllm: error: unrecognized arguments`` and status 2.

A flag that is known here but means nothing to the simulated card (``--trust-remote-code``) is taken and shown among the
non-default arguments, nothing more.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

_HUMAN = re.compile(r"([0-9]{1,15})([kKmMgGtT]?)|([0-9]{1,9}\.[0-9]{1,6})([kmgt])")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}

# Destination, flags, kind. The order is the one in which vLLM prints its non-default arguments.
_FLAGS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("host", ("--host",), "str"),
    ("port", ("--port",), "int"),
    ("uds", ("--uds",), "str"),
    ("uvicorn_log_level", ("--uvicorn-log-level",), "str"),
    ("disable_uvicorn_access_log", ("--disable-uvicorn-access-log",), "flag"),
    ("allowed_origins", ("--allowed-origins",), "str"),
    ("api_key", ("--api-key",), "list"),
    ("chat_template", ("--chat-template",), "str"),
    ("ssl_keyfile", ("--ssl-keyfile",), "str"),
    ("ssl_certfile", ("--ssl-certfile",), "str"),
    ("root_path", ("--root-path",), "str"),
    ("enable_auto_tool_choice", ("--enable-auto-tool-choice",), "flag"),
    ("tool_call_parser", ("--tool-call-parser",), "str"),
    ("api_server_count", ("--api-server-count", "-asc"), "int"),
    ("headless", ("--headless",), "flag"),
    ("config", ("--config",), "str"),
    ("model", ("--model",), "str"),
    ("tokenizer", ("--tokenizer",), "str"),
    ("tokenizer_mode", ("--tokenizer-mode",), "str"),
    ("trust_remote_code", ("--trust-remote-code",), "flag"),
    ("dtype", ("--dtype",), "str"),
    ("seed", ("--seed",), "int"),
    ("revision", ("--revision",), "str"),
    ("max_model_len", ("--max-model-len",), "human_or_auto"),
    ("quantization", ("--quantization", "-q"), "str"),
    ("enforce_eager", ("--enforce-eager",), "flag"),
    ("served_model_name", ("--served-model-name",), "list"),
    ("generation_config", ("--generation-config",), "str"),
    ("hf_token", ("--hf-token",), "str"),
    ("load_format", ("--load-format",), "str"),
    ("download_dir", ("--download-dir",), "str"),
    ("reasoning_parser", ("--reasoning-parser",), "str"),
    ("distributed_executor_backend", ("--distributed-executor-backend",), "str"),
    ("pipeline_parallel_size", ("--pipeline-parallel-size", "-pp"), "int"),
    ("tensor_parallel_size", ("--tensor-parallel-size", "-tp"), "int"),
    ("data_parallel_size", ("--data-parallel-size", "-dp"), "int"),
    ("enable_expert_parallel", ("--enable-expert-parallel",), "flag"),
    ("block_size", ("--block-size",), "int"),
    ("gpu_memory_utilization", ("--gpu-memory-utilization",), "float"),
    ("kv_cache_memory_bytes", ("--kv-cache-memory-bytes",), "human"),
    ("kv_offloading_size", ("--kv-offloading-size",), "float"),
    ("kv_cache_dtype", ("--kv-cache-dtype",), "str"),
    ("enable_prefix_caching", ("--enable-prefix-caching",), "switch"),
    ("cpu_offload_gb", ("--cpu-offload-gb",), "float"),
    ("limit_mm_per_prompt", ("--limit-mm-per-prompt",), "str"),
    ("enable_lora", ("--enable-lora",), "flag"),
    ("max_loras", ("--max-loras",), "int"),
    ("max_lora_rank", ("--max-lora-rank",), "int"),
    ("max_num_batched_tokens", ("--max-num-batched-tokens",), "human"),
    ("max_num_seqs", ("--max-num-seqs",), "int"),
    ("enable_chunked_prefill", ("--enable-chunked-prefill",), "switch"),
    ("async_scheduling", ("--async-scheduling",), "switch"),
    ("cudagraph_capture_sizes", ("--cudagraph-capture-sizes",), "ints"),
    ("max_cudagraph_capture_size", ("--max-cudagraph-capture-size",), "int"),
    ("compilation_config", ("--compilation-config", "-cc"), "str"),
    ("optimization_level", ("--optimization-level", "-O"), "int"),
    ("additional_config", ("--additional-config",), "str"),
    ("shutdown_timeout", ("--shutdown-timeout",), "int"),
    ("disable_log_stats", ("--disable-log-stats",), "flag"),
    ("enable_log_requests", ("--enable-log-requests",), "switch"),
)


def human_readable_int(text: str) -> int:
    """VLLM's sizes: lower-case suffixes are decimal, upper-case ones binary; a fraction only with a decimal suffix."""
    match = _HUMAN.fullmatch(text)
    if match is None:
        raise ValueError(text)
    if match[3] is not None:
        return round(float(match[3]) * 1000.0 ** _POWERS[match[4]])
    suffix = match[2] or ""
    base = 1024 if suffix.isupper() else 1000
    scale: int = base ** _POWERS.get(suffix.lower(), 0)
    return int(match[1]) * scale


def human_readable_int_or_auto(text: str) -> int:
    """As `human_readable_int`, and ``auto`` or ``-1`` for "what fits"."""
    return -1 if text in ("auto", "-1") else human_readable_int(text)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse ``serve MODEL [flags]``; a usage error prints vLLM's text on stderr and raises ``SystemExit(2)``."""
    main = argparse.ArgumentParser(prog="vllm")
    main.add_argument("-v", "--version", action="version", version="0.26.0")
    commands = main.add_subparsers(
        dest="subparser",
        metavar="{chat,complete,serve,launch,bench,collect-env,run-batch}",
    )
    for name in ("chat", "complete", "launch", "bench", "collect-env", "run-batch"):
        commands.add_parser(name)
    serve = commands.add_parser("serve", prog="vllm serve", usage="vllm serve [model_tag] [options]")
    serve.add_argument("model_tag", nargs="?")
    kinds: dict[str, dict[str, Any]] = {
        "str": {"type": str},
        "int": {"type": int},
        "float": {"type": float},
        "human": {"type": human_readable_int},
        "human_or_auto": {"type": human_readable_int_or_auto},
        "flag": {"action": "store_true", "default": None},
        "switch": {"action": argparse.BooleanOptionalAction},
        "list": {"nargs": "+"},
        "ints": {"type": int, "nargs": "+"},
    }
    for destination, flags, kind in _FLAGS:
        serve.add_argument(*flags, dest=destination, **kinds[kind])
    options = main.parse_args([_dashed(argument) for argument in arguments])
    if options.subparser != "serve":
        main.error("the stand-in engine knows only: serve")
    options.model = options.model_tag or options.model or "Qwen/Qwen3-0.6B"
    return options


def non_default(options: argparse.Namespace) -> dict[str, object]:
    """What was given, in vLLM's order, for the line ``non-default args``. Secrets stand in it as given,
    so that whoever copies the output must hide them."""
    given: dict[str, object] = {} if options.model_tag is None else {"model_tag": options.model_tag}
    for destination, _, _ in _FLAGS:
        value = getattr(options, destination)
        if value is not None:
            given[destination] = value
    return given


def _dashed(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
