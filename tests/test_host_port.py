"""Who has a port."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest

from family import stranger
from supervisord_vllm.host.port import UNKNOWN, port_owner, socket_owner

LISTEN = """
import socket, sys
s = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if "shared" in sys.argv: s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind((sys.argv[1], 0)); s.listen(); print(s.getsockname()[1], flush=True); sys.stdin.read()
"""


def _owner(host: str | None, port: int) -> int | None:
    found = asyncio.run(port_owner(host, port))
    return None if found is None else found.pid


@pytest.mark.parametrize(
    ("listens", "asked", "taken"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("127.0.0.1", None, True),
        ("0.0.0.0", "127.0.0.1", True),
        ("0.0.0.0", "", True),
        ("::", "127.0.0.1", True),  # a wildcard of both families
        ("127.0.0.1", "127.0.0.2", False),
    ],
)
def test_the_listener_is_named_wherever_it_is_in_the_way(listens: str, asked: str | None, taken: bool) -> None:
    with stranger(sys.executable, "-c", LISTEN, listens) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert _owner(asked, port) == (process.pid if taken else None)


def test_an_orphan_that_would_share_its_port_is_in_the_way() -> None:
    """vLLM binds with SO_REUSEPORT: a second one would silently get half of the connections."""
    with stranger(sys.executable, "-c", LISTEN, "127.0.0.1", "shared") as process:
        assert process.stdout is not None
        found = asyncio.run(port_owner("127.0.0.1", int(process.stdout.readline())))
        assert found is not None
        assert (found.pid, found.command) == (process.pid, f"{Path(sys.executable).name} -c")


def test_a_free_port_has_no_owner_and_stays_free() -> None:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert [_owner("127.0.0.1", port) for _ in range(3)] == [None, None, None]


def test_time_wait_is_no_owner() -> None:
    with closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with closing(socket.create_connection(("127.0.0.1", port))) as client:
            accepted, _ = server.accept()
            accepted.close()  # the side that closes first keeps TIME_WAIT
            assert client.recv(1) == b""
    states = [
        line.split()[3] for line in Path("/proc/net/tcp").read_text().splitlines() if f":{port:04X} " in line[:24]
    ]
    assert states == ["06"]  # the precondition
    assert _owner("127.0.0.1", port) is None


def test_a_port_that_is_held_without_listening_is_taken_by_somebody() -> None:
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        assert asyncio.run(port_owner("127.0.0.1", held.getsockname()[1])) == UNKNOWN


def test_a_host_that_is_not_ours_or_unknown_has_no_owner() -> None:
    assert _owner("192.0.2.1", 8000) is None
    assert _owner("no-such-host.invalid", 8000) is None


def test_a_unix_socket_is_owned_by_who_listens(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert asyncio.run(socket_owner(str(path))) is None
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(path))
        assert asyncio.run(socket_owner(str(path))) is None
        server.listen(1)
        found = asyncio.run(socket_owner(str(path)))
        assert found is not None
        assert found.pid == os.getpid()
    assert path.exists()
    assert asyncio.run(socket_owner(str(path))) is None  # a stale file
