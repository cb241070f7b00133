"""A neighbour: another process that holds device memory, and takes more or less of it when it is told to.

``python -m benchmarks.gpu.neighbour WHERE``; WHERE is ``gpu`` (the first visible one), ``host`` or ``card:STATE`` (a
simulated card). It reads one word and a number of bytes a line from standard input and answers each with ``free N``:
``hold N`` takes N bytes more, ``leave N`` takes all but N bytes of what is free. It ends with its standard input, and
its memory with it. On a GPU it is plain device memory of the driver's own interface (no torch: it is there in a
second).
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

MIB, GIB = 1 << 20, 1 << 30
GRAIN = 2 * MIB
"""The driver gives memory in pages of this size."""


class NeighbourError(Exception):
    """The neighbour could not do as it was told; one line."""


class Memory(Protocol):
    """Where memory is taken."""

    def take(self, size: int) -> bool:
        """Take this many bytes more; whether they were there."""

    def free(self) -> int:
        """Bytes that are free now, for anybody."""


class GpuMemory:
    """Memory of the first visible GPU."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NeighbourError(f"no CUDA driver: {error}") from error
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            raise NeighbourError(f"{name} failed with CUDA error {status}")

    def take(self, size: int) -> bool:
        """See `Memory`."""
        pointer = ctypes.c_uint64()
        return bool(self._cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0)

    def free(self) -> int:
        """See `Memory`."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value


class HostMemory:
    """Anonymous memory of the machine or the cgroup, touched so that it is real."""

    def __init__(self) -> None:
        self._held: list[mmap.mmap] = []

    def take(self, size: int) -> bool:
        """See `Memory`."""
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page = b"x" * mmap.PAGESIZE
        for at in range(0, size - mmap.PAGESIZE + 1, mmap.PAGESIZE):
            memory[at : at + mmap.PAGESIZE] = page
        self._held.append(memory)
        return True

    def free(self) -> int:
        """See `Memory`; the machine's own count, which a cgroup's limit may undercut."""
        from supervisord_vllm.host.hostmemory import HostMemory as Sampled

        return Sampled().sample(frozenset())[0].free_bytes


class CardMemory:
    """Memory of a simulated card."""

    def __init__(self, state: str) -> None:
        from supervisord_vllm.simulation.shared_card import CardFullError, SharedCard

        self._card, self._full = SharedCard(state), CardFullError
        self._card.grow(self._card.card().device.context, "python")  # as a CUDA process has one

    def take(self, size: int) -> bool:
        """See `Memory`."""
        try:
            self._card.grow(size, "python")
        except self._full:
            return False
        return True

    def free(self) -> int:
        """See `Memory`."""
        return self._card.free()


def leave(memory: Memory, keep: int, grain: int = GRAIN) -> int:
    """Take pieces until at most ``keep`` bytes and one grain are free; returns what is free then.

    A piece that is refused is tried again at half the size: free memory need not be in one block.
    """
    piece = 8 * GIB
    while piece >= grain:
        free = memory.free()
        size = min(piece, (free - keep) // grain * grain)
        if size < grain:
            break
        if not memory.take(size):
            piece = size // 2
    return memory.free()


def open_memory(where: str) -> Memory:
    """The memory that WHERE names."""
    if where == "gpu":
        return GpuMemory()
    if where == "host":
        return HostMemory()
    if where.startswith("card:"):
        return CardMemory(where.removeprefix("card:"))
    raise NeighbourError(f"{where!r}: gpu, host or card:STATE is wanted")


def serve(memory: Memory, say: Callable[[str], None]) -> None:
    """Do as the lines of standard input say."""
    say(f"free {memory.free()}")
    for line in sys.stdin:
        verb, _, number = line.strip().partition(" ")
        size = int(number)
        if verb == "leave":
            leave(memory, size)
        elif not memory.take(size):
            say(f"refused {memory.free()}")
            continue
        say(f"free {memory.free()}")


class Neighbour:
    """The neighbour seen from the benchmark; a context manager at whose end it is gone with its memory."""

    def __init__(self, where: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.neighbour", where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._answer()

    def __enter__(self) -> Neighbour:  # noqa: PYI034 - `Self` is new in 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hold(self, size: int) -> int:
        """Take this many bytes more; returns what is free then. Raises `NeighbourError`."""
        return self._tell(f"hold {size}")

    def leave(self, size: int) -> int:
        """Take all but this many bytes; returns what is free then. Raises `NeighbourError`."""
        return self._tell(f"leave {size}")

    def close(self) -> None:
        """End it, and wait until it is gone."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _tell(self, line: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        verb, _, number = self._process.stdout.readline().strip().partition(" ")
        if verb != "free":
            raise NeighbourError(f"the neighbour {verb or 'ended'}: {number} bytes are free")
        return int(number)


def main() -> int:
    """Run the command."""
    try:
        serve(open_memory(sys.argv[1]), lambda text: print(text, flush=True))
    except NeighbourError as error:
        print(f"neighbour: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
