"""The history of one instance in SQLite: written by the daemon alone (`Store`), read by anyone who may (`History`).

Losing it is never fatal: a torn file, or a newer version's, is set aside; without one that is locked, full, read-only
or hung the daemon goes on until it is back, which costs at most entries that are counted; launch numbers go on from the
log files. Imports the standard library and the core only, because ``status`` and ``explain`` read it.
"""

from __future__ import annotations

from supervisord_vllm.store.history import History
from supervisord_vllm.store.launch_logs import launch_log, launch_numbers, prune_launch_logs
from supervisord_vllm.store.schema import StoreError
from supervisord_vllm.store.store import Store, durable

__all__ = [
    "History",
    "Store",
    "StoreError",
    "durable",
    "launch_log",
    "launch_numbers",
    "prune_launch_logs",
]
