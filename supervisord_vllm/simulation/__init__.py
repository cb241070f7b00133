"""A GPU and vLLM model of its own; it must never import `supervisord_vllm.core`."""
