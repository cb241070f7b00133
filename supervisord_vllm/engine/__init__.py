"""vLLM's side: its command line, its output, its endpoints."""
