"""Talking to a running daemon through its control socket, with the standard library alone.

No daemon is not an error here but an answer (`NoDaemonError`): the caller decides what the store can say instead.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer

from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.redaction import printable

LARGEST_ANSWER = 64 << 20


class NoDaemonError(Exception):
    """Nobody listens on the socket."""


class DaemonError(Exception):
    """The daemon refused or did not answer; the message says why."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(path: Path, target: str, body: object = None, timeout: float = 10.0) -> dict[str, Any]:
    """One question to the daemon that listens at ``path``: GET, or POST with a JSON body.

    Raises:
        NoDaemonError: there is no socket, or nobody listens.
        DaemonError: it refused, or gave no answer within ``timeout`` seconds.
    """
    connection = _UnixConnection(path, timeout)
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", target, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        status, content = response.status, response.read(LARGEST_ANSWER)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        raise NoDaemonError(f"no daemon listens at {path}") from error
    except TimeoutError as error:
        raise DaemonError(f"the daemon at {path} does not answer within {timeout:g} s") from error
    except PermissionError as error:
        raise DaemonError(
            f"control socket {path}: permission denied; you are neither owner nor in its group"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise DaemonError(f"control socket {path}: {error}") from error
    finally:
        connection.close()
    try:
        answer = json.loads(content)
    except ValueError:
        answer = {}
    if not isinstance(answer, dict) or status >= 400:
        reason = answer.get("error") if isinstance(answer, dict) else None
        raise DaemonError(str(reason or f"the daemon answered {status}"))
    return answer


def fail(message: str, code: ExitCode) -> NoReturn:
    """Say one line on standard error and end with ``code``."""
    print(f"vllm-supervise: {printable(message)}", file=sys.stderr)
    raise typer.Exit(int(code))
