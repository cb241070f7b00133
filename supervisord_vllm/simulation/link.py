"""The pipe between API server and EngineCore: one JSON object a line over a socket pair."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]


class Link:
    """EngineCore's end. It never fails when the API server is gone: `open` becomes false, sending does nothing."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self.open = True

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message, or nothing when nobody is there."""
        try:
            self._socket.sendall(encode(message))
        except OSError:
            self.open = False

    def first(self) -> Message | None:
        """Wait for the next message; ``None`` when the other side is gone."""
        while b"\n" not in self._buffer:
            if not self._fill():
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def arrived(self) -> list[Message]:
        """What can be read at once, after select said so."""
        self._fill()
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def _fill(self) -> bool:
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        self._buffer += data
        self.open = self.open and bool(data)
        return bool(data)


def encode(message: Message) -> bytes:
    """One message as a line."""
    return json.dumps(message).encode() + b"\n"
