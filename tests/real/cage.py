"""A cage: a memory cgroup (v1) in which a daemon, its engine and a neighbour live, as in a container with a limit.

The cgroup is bind-mounted over /sys/fs/cgroup/memory in a private mount namespace, so that whoever reads the limit
there, as vLLM and our host-memory sampler do, reads the cage's. Needs root and a v1 memory controller. What happens
inside is real: the kernel kills what grows beyond, and `vllm serve` refuses to start where its share is not free.

Measured with 6 GiB and vLLM 0.32.0: it sees 5.21 of 6.0 GiB alone and 3.20 beside a neighbour of 2 GiB when EngineCore
is spawned (its own imports take 0.79 GiB), 3.44 beside the neighbour when it is forked (0.55 GiB). With a cold page
cache up to 0.6 GiB more is charged to the cage while vLLM's files are read, hence `warm`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from real.waiting import until

CONTROLLER = Path("/sys/fs/cgroup/memory")
GIB = 1 << 30

# The mount happens in the child's own namespace; "0" in cgroup.procs means the writer. Both before the exec, so that
# the process that the caller started is the caged one, with the same pid.
_ENTER = 'mount --bind "$1" /sys/fs/cgroup/memory && echo 0 > /sys/fs/cgroup/memory/cgroup.procs && shift && exec "$@"'


def missing() -> str | None:
    """Why no cage can be made here, or ``None``."""
    if os.geteuid() != 0:
        return "a memory cgroup needs root"
    if not (CONTROLLER / "memory.limit_in_bytes").exists():
        return f"no memory controller of cgroup v1 at {CONTROLLER}"
    if subprocess.run(["unshare", "--mount", "--propagation", "private", "true"], check=False).returncode != 0:
        return "no private mount namespace can be made (unshare --mount failed)"
    return None


@dataclass(frozen=True)
class Cage:
    """One cgroup with a limit."""

    path: Path

    def command(self, *argv: str) -> list[str]:
        """The command line that runs another one inside; the pid stays the same through to it."""
        return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _ENTER, "cage", str(self.path), *argv]

    @property
    def used_bytes(self) -> int:
        """What is charged, page cache included: the number that vLLM subtracts from the limit."""
        return int((self.path / "memory.usage_in_bytes").read_text())

    @property
    def oom_kills(self) -> int:
        """How many processes the kernel has killed for memory in here."""
        fields = dict(line.split() for line in (self.path / "memory.oom_control").read_text().splitlines())
        return int(fields["oom_kill"])

    def pids(self) -> list[int]:
        """Who is inside."""
        return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]

    @contextmanager
    def neighbour(self, size_bytes: int) -> Iterator[subprocess.Popen[bytes]]:
        """A process inside that holds this much real memory until the block ends; entered once it holds it."""
        argv = self.command(sys.executable, "-I", str(Path(__file__).with_name("neighbour.py")), str(size_bytes))
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"holding\n", f"the neighbour could not take {size_bytes} bytes"
            yield process


@contextmanager
def cage(limit_bytes: int = 6 * GIB) -> Iterator[Cage]:
    """Make a cage; at the end it must be empty and is removed."""
    made = Cage(CONTROLLER / f"vllm-supervise-{uuid.uuid4().hex[:12]}")
    made.path.mkdir()
    try:
        (made.path / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield made
        until(lambda: not made.pids(), 30, lambda: f"still in the cage: {made.pids()}")
    finally:
        made.path.rmdir()


def warm(folder: Path) -> None:
    """Read a folder's files once, outside any cage.

    Page cache is charged to the cgroup that reads first and counts as used there, so a cold vLLM would find a gigabyte
    less in the cage than a warm one.
    """
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 22):
                    pass
