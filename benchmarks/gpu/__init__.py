"""Memory faults on a real card: the daemon on a real engine, through six faults that are made by real means.

``python -m benchmarks.gpu`` (see `benchmarks.gpu.__main__`) needs a GPU and a vLLM, or one of the two dry runs: the CPU
build of vLLM in a memory cgroup, or the stand-in engine with its simulated card. Nothing here is a gate: it measures
and writes down. What was seen lies in docs/gpu.md.
"""
