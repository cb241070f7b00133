"""What the daemon serves: the control socket for operators, HTTP for machines, metrics for Prometheus.

All of it reads a `Snapshot` and asks the daemon through `Control`; nothing here decides, and no secret passes through.
"""

from __future__ import annotations

from supervisord_vllm.api.control import Control, RefusedError, Verb
from supervisord_vllm.api.control_socket import ControlSocket
from supervisord_vllm.api.exporter import Exporter
from supervisord_vllm.api.http import HttpServer

__all__ = ["Control", "ControlSocket", "Exporter", "HttpServer", "RefusedError", "Verb"]
