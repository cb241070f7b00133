"""A supervisor for vLLM: runs `vllm serve`, says what went wrong, and restarts it with a configuration that fits."""

__version__ = "0.1.0"
