"""The title of a process, as ``ps`` shows it; vLLM names its EngineCore ``VLLM::EngineCore``."""

from __future__ import annotations

import ctypes
from pathlib import Path

_PR_SET_NAME = 15


def set_process_title(title: str) -> None:
    """Write the title over this process's own argument area (never beyond it: the environment stays readable) and set
    the kernel's 15-character name. Where the system does not allow it, nothing happens."""
    raw = title.encode()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, raw[:15], 0, 0, 0)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: fields 48 and 49 of proc(5)
        if 0 < start < end and end - start > len(raw):
            ctypes.memmove(start, raw.ljust(end - start - 1, b"\0") + b"\0", end - start)
    except (OSError, ValueError, IndexError, AttributeError):
        pass
