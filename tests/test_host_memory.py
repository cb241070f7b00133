"""Memory of the host within its limits, and looking at any device without blocking."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from family import family
from supervisord_vllm.core.facts import DeviceMemory
from supervisord_vllm.host.hostmemory import CONTEXT_BYTES, HostMemory
from supervisord_vllm.host.memory import MemoryUnavailable, Sampler, device_count, open_source
from supervisord_vllm.host.simulated import CardMemory
from supervisord_vllm.simulation.shared_card import SharedCard

GIB, MIB = 1 << 30, 1 << 20
NOBODY: frozenset[int] = frozenset()


def _kernel_says() -> tuple[int, int]:
    """Total and available of the first memory node (of the machine where it has none), added up as vLLM does."""
    node = Path("/sys/devices/system/node/node0/meminfo")
    path = node if node.exists() else Path("/proc/meminfo")
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    sizes = {name.split()[-1]: int(value.split()[0]) << 10 for name, value in lines.items()}
    if path == node:
        return sizes["MemTotal"], sum(
            sizes[name] for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
        )
    return sizes["MemTotal"], sizes["MemAvailable"]


def test_without_a_limit_host_memory_is_what_the_kernel_says() -> None:
    if HostMemory().limits():
        pytest.skip("this machine limits our memory cgroup: see the test of limits")
    _, before = _kernel_says()
    (sample,) = HostMemory().sample(NOBODY)
    total, after = _kernel_says()
    assert sample.device == "host-memory"
    assert sample.total_bytes == total
    assert min(before, after) - GIB // 4 <= sample.free_bytes <= max(before, after) + GIB // 4
    assert sample.context_bytes == CONTEXT_BYTES


def test_a_worker_sees_its_own_memory_node_not_the_whole_machine(tmp_path: Path) -> None:
    node = "".join(
        f"Node 1 {name}: {size << 20} kB\n"
        for name, size in {
            "MemTotal": 32,
            "MemFree": 8,
            "Active(file)": 2,
            "Inactive(file)": 3,
            "SReclaimable": 1,
        }.items()
    )
    files = {
        "proc/self/status": "Name:\tx\nMems_allowed_list:\t1-3\n",
        "sys/devices/system/node/node1/meminfo": node,
    }
    (sample,) = _machine(tmp_path, "", files).sample(NOBODY)
    assert (sample.total_bytes, sample.free_bytes) == (32 * GIB, 14 * GIB)


def test_own_memory_and_holders_are_those_of_real_processes(tmp_path: Path) -> None:
    async def observe() -> None:
        async with family(tmp_path, "hold:200") as (child, _):
            (foreign,) = await asyncio.to_thread(HostMemory().sample, NOBODY)
            (own,) = await asyncio.to_thread(HostMemory().sample, frozenset({child.pid}))
            assert foreign.own_bytes == 0
            assert 200 * MIB <= own.own_bytes <= 260 * MIB
            holder = next((ref for ref in own.holders if ref.pid == child.pid), None)
            if holder is not None:  # eight bigger ones may run on this machine
                assert holder.ours
                assert 200 * MIB <= (holder.memory_bytes or 0) <= 300 * MIB
            sizes = [ref.memory_bytes or 0 for ref in own.holders]
            assert sizes == sorted(sizes, reverse=True)

    asyncio.run(observe())


def _machine(folder: Path, cgroup: str, files: dict[str, str]) -> HostMemory:
    """A machine of 64 GiB with 50 GiB available, in folders."""
    files = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {50 << 20} kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostMemory(folder)


def _v2(at: str, limit: str, current: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.current": f"{current}\n",
        f"{at}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file 7\n",
    }


def _v1(at: str, limit: int, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{usage}\n",
        f"{at}/memory.stat": f"cache 1\ninactive_file 5\ntotal_inactive_file {inactive}\n",
    }


ROOT = "sys/fs/cgroup"
CONTROLLERS = {f"{ROOT}/cgroup.controllers": "memory\n"}
HUGE = 9223372036854771712


@pytest.mark.parametrize(
    ("cgroup", "files", "total", "free"),
    [
        pytest.param("0::/\n", CONTROLLERS, 64, 50, id="v2, no limit"),
        pytest.param("0::/\n", CONTROLLERS | _v2(ROOT, "max", GIB), 64, 50, id="v2, max"),
        pytest.param(  # a container: vLLM reads this file and subtracts the whole usage
            "0::/\n", CONTROLLERS | _v2(ROOT, str(8 * GIB), 3 * GIB, 2 * GIB), 8, 5, id="v2, container"
        ),
        pytest.param(  # a unit with MemoryMax=: only the kernel looks, and it drops inactive cache first
            "0::/system.slice/x.service\n",
            CONTROLLERS | _v2(f"{ROOT}/system.slice/x.service", str(8 * GIB), 3 * GIB, 2 * GIB),
            8,
            7,
            id="v2, unit",
        ),
        pytest.param(
            "0::/a/b\n",
            CONTROLLERS | _v2(f"{ROOT}/a/b", str(32 * GIB), GIB) | _v2(f"{ROOT}/a", str(16 * GIB), 12 * GIB),
            16,
            4,
            id="v2, a parent is tighter",
        ),
        pytest.param(
            "9:cpu:/\n4:memory:/docker/abc\n0::/\n",  # the path is the host's: below the mount it does not exist
            _v1(f"{ROOT}/memory", 6 * GIB, 2 * GIB, GIB),
            6,
            4,
            id="v1, bind-mounted",
        ),
        pytest.param("4:cpu,memory:/\n", _v1(f"{ROOT}/memory", HUGE, 2 * GIB), 64, 50, id="v1, no limit"),
        pytest.param(
            "4:memory:/j\n0::/j\n",
            _v1(f"{ROOT}/memory", HUGE, 9 * GIB)
            | _v1(f"{ROOT}/memory/j", 6 * GIB, 2 * GIB, GIB)
            | {f"{ROOT}/unified/cgroup.controllers": "\n"},
            6,
            5,
            id="hybrid, unit",
        ),
        pytest.param("0::/../../x\n", CONTROLLERS, 64, 50, id="v2, outside the namespace"),
        pytest.param("0::/\n", CONTROLLERS | _v2(ROOT, str(80 * GIB), 70 * GIB), 64, 50, id="v2, above the machine"),
        pytest.param("0::/\n", CONTROLLERS | _v2(ROOT, str(8 * GIB), 9 * GIB), 8, 0, id="v2, over its limit"),
        pytest.param("garbage\n", {}, 64, 50, id="no cgroups"),
    ],
)
def test_total_and_free_are_the_least_of_machine_and_limits(
    tmp_path: Path, cgroup: str, files: dict[str, str], total: int, free: int
) -> None:
    (sample,) = _machine(tmp_path, cgroup, files).sample(NOBODY)
    assert (sample.total_bytes, sample.free_bytes) == (total * GIB, free * GIB)


def test_page_cache_that_vllm_counts_as_used_is_named(tmp_path: Path) -> None:
    host = _machine(tmp_path, "0::/\n", CONTROLLERS | _v2(ROOT, str(8 * GIB), 3 * GIB, 2 * GIB))
    (sample,) = host.sample(NOBODY)
    assert [(ref.pid, ref.command, ref.memory_bytes) for ref in sample.holders] == [(0, "page cache", 2 * GIB)]


def test_holders_are_those_who_share_the_limit(tmp_path: Path) -> None:
    async def observe() -> None:
        async with family(tmp_path, "hold:100") as (child, _):
            members = {f"{ROOT}/x/cgroup.procs": "", f"{ROOT}/x/below/cgroup.procs": f"{child.pid}\n"}
            limited = CONTROLLERS | _v2(f"{ROOT}/x", str(8 * GIB), GIB) | members
            (sample,) = _machine(tmp_path, "0::/x\n", limited).sample(NOBODY)
            assert [ref.pid for ref in sample.holders] == [child.pid]

    asyncio.run(observe())


def test_meminfo_without_numbers_is_unavailable_by_name(tmp_path: Path) -> None:
    host = _machine(tmp_path, "", {"proc/meminfo": "MemTotal: lots\n"})
    with pytest.raises(MemoryUnavailable, match=r"proc/meminfo names no MemTotal and MemAvailable"):
        host.sample(NOBODY)


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists(),
    reason="needs root and a v1 memory cgroup",
)
def test_a_real_cgroup_limit_is_seen_from_inside_and_when_bind_mounted() -> None:
    """The sampler in a real 512 MiB cgroup: found by path, and as vLLM finds it (the mount's root file)."""
    group = Path(f"/sys/fs/cgroup/memory/supervise-test-{os.getpid()}")
    code = (
        "from supervisord_vllm.host.hostmemory import HostMemory as H\n"
        "s = H().sample(frozenset())[0]; print(s.total_bytes, s.free_bytes, [l.visible for l in H().limits()])"
    )
    enter = f"echo $$ >{group}/cgroup.procs && {{mount}} exec {sys.executable} -c '{code}'"
    bind = f"mount --bind {group} /sys/fs/cgroup/memory &&"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(512 * MIB))
        for mount, seen in (("", "[False]"), (bind, "[True]")):
            shell = ["unshare", "--mount", "sh", "-c", enter.format(mount=mount)]
            done = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=60)
            total, free, visible = done.stdout.split(maxsplit=2)
            assert int(total) == 512 * MIB
            assert 300 * MIB < int(free) < 512 * MIB
            assert visible.strip() == seen
    finally:
        group.rmdir()


# --- the sampler


class Fake:
    """A source whose answers the test decides; ``block`` holds a call back until it is set."""

    name = "fake"

    def __init__(self) -> None:
        self.block = threading.Event()
        self.block.set()
        self.calls = 0
        self.error: Exception | None = None
        self.threads: set[int] = set()

    def sample(self, own_pids: frozenset[int]) -> tuple[DeviceMemory, ...]:
        self.calls += 1
        self.threads.add(threading.get_ident())
        self.block.wait(60)
        if self.error is not None:
            raise self.error
        return (DeviceMemory("fake", 100, 100 - self.calls, 1, own_bytes=len(own_pids)),)


def test_samples_come_from_one_thread_that_is_not_the_loops() -> None:
    async def observe() -> None:
        fake = Fake()
        sampler = Sampler(lambda: fake)
        assert (sampler.last, sampler.age_s) == (None, None)
        samples = await asyncio.gather(*(sampler.sample(frozenset({1, 2})) for _ in range(3)))
        assert [sample[0].free_bytes for sample in samples] == [99, 98, 97]
        assert sampler.last == samples[-1]
        assert sampler.age_s is not None
        assert len(fake.threads) == 1
        assert threading.get_ident() not in fake.threads
        sampler.close()

    asyncio.run(observe())


def test_a_blocked_source_returns_control_and_piles_up_nothing() -> None:
    async def observe() -> None:
        fake = Fake()
        sampler = Sampler(lambda: fake, timeout_s=0.1)
        first = await sampler.sample(NOBODY)
        fake.block.clear()
        with pytest.raises(MemoryUnavailable, match="device memory has not answered for 0 s"):
            await sampler.sample(NOBODY)
        sampler._asked_at -= 12
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(MemoryUnavailable, match="device memory has not answered for 12 s"):
                await sampler.sample(NOBODY)
        assert time.monotonic() - began < 5
        assert fake.calls == 2
        assert threading.active_count() < 20
        assert sampler.last == first  # the last good one is kept, with its age
        fake.block.set()
        for _ in range(1000):
            try:
                (sample,) = await sampler.sample(NOBODY)
                break
            except MemoryUnavailable:
                await asyncio.sleep(0.01)
        assert sample.free_bytes == 97  # it answers again; the late answer was not taken for the new question
        sampler.close()

    asyncio.run(observe())


def test_a_failed_source_is_opened_again() -> None:
    async def observe() -> None:
        opened: list[Fake] = []

        def opener() -> Fake:
            opened.append(Fake())
            if len(opened) == 1:
                raise MemoryUnavailable("no driver yet")
            return opened[-1]

        sampler = Sampler(opener)
        with pytest.raises(MemoryUnavailable, match="no driver yet"):
            await sampler.sample(NOBODY)
        await sampler.sample(NOBODY)
        opened[-1].error = MemoryUnavailable("GPU is lost")
        with pytest.raises(MemoryUnavailable, match="GPU is lost"):
            await sampler.sample(NOBODY)
        await sampler.sample(NOBODY)
        opened[-1].error = KeyError("a bug")
        with pytest.raises(MemoryUnavailable, match="KeyError: 'a bug'"):
            await sampler.sample(NOBODY)
        await sampler.sample(NOBODY)
        assert len(opened) == 4
        sampler.close()

    asyncio.run(observe())


# --- choosing a source


def test_a_simulated_card_can_be_looked_at_before_the_first_launch(tmp_path: Path) -> None:
    source = open_source(f"card:{tmp_path / 'card.json'}", {})
    assert source.name == f"card:{tmp_path / 'card.json'}"
    (empty,) = source.sample(NOBODY)
    assert empty.device.startswith("GPU-")
    assert empty.free_bytes == empty.total_bytes > 130 * GIB
    SharedCard(tmp_path / "card.json").hold(40 * GIB, "neighbour")
    (foreign,) = source.sample(NOBODY)
    assert (foreign.own_bytes, foreign.foreign_bytes) == (0, 40 * GIB)
    assert [(ref.pid, ref.command, ref.ours) for ref in foreign.holders] == [(os.getpid(), "neighbour", False)]
    (own,) = source.sample(frozenset({os.getpid()}))
    assert (own.own_bytes, own.foreign_bytes) == (40 * GIB, 0)


def test_a_damaged_card_is_unavailable_by_name(tmp_path: Path) -> None:
    source = CardMemory(tmp_path / "card.json", {})
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(MemoryUnavailable, match=r"simulated card: .*card\.json"):
        source.sample(NOBODY)


def test_a_source_that_does_not_exist_is_refused_by_name() -> None:
    assert open_source("host", {}).name == "host"
    with pytest.raises(ValueError, match="memory source 'rocm': use auto, nvml, host or card:PATH"):
        open_source("rocm", {})


@pytest.mark.parametrize(
    ("args", "devices"),
    [
        ([], 1),
        (["--tensor-parallel-size", "2"], 2),
        (["-tp", "2", "-pp=2"], 4),
        (["--tensor_parallel_size=8"], 8),
        (["--tensor-parallel", "4"], 4),
        (["--pipeline-parallel-size", "2", "--data-parallel-size", "2"], 4),
        (["--tensor-parallel-size"], 1),
        (["--tensor-parallel-size", "many"], 1),
        (["--tensor-parallel-size", "0"], 1),
        (["--tensor", "2", "--tool-parser", "2"], 1),
    ],
)
def test_devices_are_counted_as_vllm_spells_them(args: list[str], devices: int) -> None:
    assert device_count(args) == devices
