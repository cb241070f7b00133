"""From a command line to what the engine runs with: vLLM's defaults for the card, and its refusals."""

from __future__ import annotations

import argparse

from supervisord_vllm.simulation import texts
from supervisord_vllm.simulation.card import Card, Model
from supervisord_vllm.simulation.console import Console
from supervisord_vllm.simulation.ledger import ONLINE, Settings, default_capture_sizes

DEFAULT_UTILIZATION = 0.92

_KNOWN_METHODS = (*ONLINE, "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "bitsandbytes")


class RefusedError(Exception):
    """vLLM refuses the command line: the traceback's name in `tracebacks.SERVER` and its last lines."""

    def __init__(self, trace: str, *last: str) -> None:
        super().__init__(last[0])
        self.trace = trace
        self.texts = last


def find_model(card: Card, options: argparse.Namespace, missing: bool) -> Model:
    """The model on the card; ``missing`` pretends that there is none. Raises `RefusedError` with the hub's sentence."""
    name: str = options.model
    model = None if missing else card.models.get(name)
    if model is not None:
        return model
    if name.startswith(("/", ".", "~")):
        text = f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{name}'."
        raise RefusedError(
            "model_path", f"huggingface_hub.errors.HFValidationError: {text} Use `repo_type` argument if needed."
        )
    raise RefusedError(
        "hub",
        f"OSError: {name} is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'",
        "If this is a private repository, make sure to pass a token having permission to this repo either by logging "
        "in with `hf auth login` or by passing `token=<your_token>`",
    )


def resolve(card: Card, model: Model, options: argparse.Namespace, console: Console) -> Settings:
    """Fill in vLLM's defaults, printing what vLLM prints on the way. Raises `RefusedError`."""
    console.info("model.py:623", f"Resolved architecture: {model.architecture}")
    length: int | None = options.max_model_len
    if length is not None and length > model.max_model_len:
        text = (
            f"User-specified max_model_len ({length}) is greater than the derived max_model_len "
            f"(max_position_embeddings={float(model.max_model_len)} or model_max_length=None in model's config.json)."
        )
        values = "'model': ...nderer_num_workers': 1"
        raise RefusedError("model_config", *texts.validation_error("ModelConfig", text + texts.LONG_LEN, values))
    method = options.quantization
    _check_method(model, method)
    auto = length == -1
    length = model.max_model_len if length is None or auto else length
    console.info("model.py:1788", f"Using max model len {length}")
    world = (options.tensor_parallel_size or 1) * (options.pipeline_parallel_size or 1)
    if world > 1:
        text = (
            f"World size ({world}) is larger than the number of available GPUs (1) in this node. If this is "
            "intentional and you are using:\n- ray, set '--distributed-executor-backend ray'.\n- multiprocessing, set "
            "'--nnodes' appropriately."
        )
        values = "'pipeline...'numa_bind_cpus': None"
        raise RefusedError("config", *texts.validation_error("ParallelConfig", text, values))
    utilization = DEFAULT_UTILIZATION if options.gpu_memory_utilization is None else options.gpu_memory_utilization
    if not 0 < utilization <= 1:
        wanted = "less than or equal to 1" if utilization > 1 else "greater than 0"
        kind = "less_than_equal" if utilization > 1 else "greater_than"
        raise RefusedError(
            "config",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig",
            "gpu_memory_utilization",
            f"  Input should be {wanted} [type={kind}, input_value={utilization}, input_type=float]",
            f"    For further information visit https://errors.pydantic.dev/2.14/v/{kind}",
        )
    seqs: int | None = options.max_num_seqs
    tokens: int | None = options.max_num_batched_tokens
    if tokens is None:
        tokens = min(card.device.default_max_num_batched_tokens, (seqs or card.device.default_max_num_seqs) * length)
    if seqs is None:
        seqs = min(card.device.default_max_num_seqs, tokens)
    console.info("scheduler.py:252", f"Chunked prefill is enabled with max_num_batched_tokens={tokens}.")
    if seqs < 1 or tokens < seqs:
        text = f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})."
        raise RefusedError("config", *texts.validation_error("SchedulerConfig", text))
    eager = bool(options.enforce_eager)
    sizes: tuple[int, ...] = ()
    if not eager:
        largest = options.max_cudagraph_capture_size
        given = options.cudagraph_capture_sizes
        sizes = tuple(sorted(given)) if given else default_capture_sizes(seqs, tokens, largest)
    return Settings(
        utilization=utilization,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        eager=eager,
        quantization=method or model.quantization,
        kv_cache_dtype=options.kv_cache_dtype or "auto",
        capture_sizes=sizes,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        auto_len=auto,
    )


def print_engine_notes(settings: Settings, console: Console) -> None:
    """What both processes say about compilation once the configuration stands."""
    console.info("vllm.py:1109", "Asynchronous scheduling is enabled.")
    priority = "'native'"
    if settings.eager:
        priority = "'vllm_c', 'native'"
        console.warning(
            "vllm.py:1163",
            "Enforce eager set, disabling torch.compile and CUDAGraphs. This is equivalent to setting -cc.mode=none "
            "-cc.cudagraph_mode=none",
        )
        console.warning(
            "vllm.py:1213",
            "Inductor compilation was disabled by user settings, optimizations settings that are only active during "
            "inductor compilation will be ignored.",
        )
    console.info(
        "kernel.py:295",
        "Final IR op priority after setting platform defaults: "
        f"IrOpPriorityConfig(rms_norm=[{priority}], fused_add_rms_norm=[{priority}])",
    )
    if settings.eager:
        console.info("vllm.py:1392", "Cudagraph is disabled under eager mode")
        console.info("compilation.py:329", "Enabled custom fusions: norm_quant, act_quant")


def _check_method(model: Model, method: str | None) -> None:
    text = None
    own = model.quantization
    if method is None or method == own:
        return
    if method not in _KNOWN_METHODS:
        text = f"Unknown quantization method: {method}. Must be one of {list(_KNOWN_METHODS)}."
    elif own is not None and method.removesuffix("_marlin") != own:
        text = (
            f"Quantization method specified in the model config ({own}) does not match the quantization method "
            f"specified in the `quantization` argument ({method})."
        )
    elif own is None and method not in ONLINE:
        text = f"Cannot find the config file for {method}"
    if text is not None:
        raise RefusedError("config", *texts.validation_error("VllmConfig", text, "'model_con...additional_config': {}"))
