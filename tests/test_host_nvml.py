"""GPU memory through NVML.

The fakes return what NVML's manual documents. Never run on such a card: "not supported", MIG, several GPUs and a card
that vanished. Seen on one H200: totals, reserved part, free and holders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from supervisord_vllm.core.facts import DeviceMemory
from supervisord_vllm.host import memory
from supervisord_vllm.host.memory import MemoryUnavailable
from supervisord_vllm.host.nvml import NoDriver, NvmlMemory

MIB, GIB = 1 << 20, 1 << 30
ERROR = pynvml.NVMLError


def _error(name: str) -> Exception:
    found: Exception = ERROR(getattr(pynvml, name))
    return found


class Gpu:
    """One GPU of the fake: sizes in MiB; ``None`` for what is not supported."""

    def __init__(self, uuid: str, total: int | None = 143_771, reserved: int | None = 615, free: int = 143_156) -> None:
        self.uuid, self.total, self.reserved, self.free = uuid, total, reserved, free
        self.compute: list[tuple[int, int | None]] = []
        self.graphics: list[tuple[int, int | None]] = []
        self.slices: list[Gpu | None] = []
        self.bus = 0x3B


class Nvml(ModuleType):
    """NVML for these GPUs. ``failing`` maps a function's name to the error that it returns."""

    def __init__(self, *gpus: Gpu, failing: dict[str, str] | None = None) -> None:
        super().__init__("fake_nvml")
        self.gpus, self.failing = gpus, failing or {}
        for name in dir(pynvml):
            if name.startswith("NVML_") or name in {"NVMLError", "nvmlMemory_v2"}:
                setattr(self, name, getattr(pynvml, name))
        functions: dict[str, Callable[..., object]] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"00000000:{gpu.bus:02X}:00.0"),
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda part: next(
                gpu for gpu in gpus if part in gpu.slices
            ),
            "nvmlDeviceGetName": lambda gpu: b"NVIDIA H200",  # older bindings give bytes
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: self._processes(gpu.compute),
            "nvmlDeviceGetGraphicsRunningProcesses": lambda gpu: self._processes(gpu.graphics),
            "nvmlDeviceGetMigMode": self._mig_mode,
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: len(gpu.slices),
            "nvmlDeviceGetMigDeviceHandleByIndex": self._slice,
        }
        for name, function in functions.items():
            setattr(self, name, self._guarded(name, function))

    def _guarded(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            if name in self.failing:
                raise _error(self.failing[name])
            return function(*arguments, **named)

        return call

    @staticmethod
    def _processes(listed: list[tuple[int, int | None]]) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None if size is None else size * MIB) for pid, size in listed]

    @staticmethod
    def _memory(gpu: Gpu, version: int | None = None) -> SimpleNamespace:
        if gpu.total is None or (version is not None and gpu.reserved is None):
            raise _error("NVML_ERROR_NOT_SUPPORTED")
        assert version in (None, pynvml.nvmlMemory_v2)
        reserved = {} if version is None else {"reserved": (gpu.reserved or 0) * MIB}
        return SimpleNamespace(total=gpu.total * MIB, free=gpu.free * MIB, **reserved)

    @staticmethod
    def _mig_mode(gpu: Gpu) -> tuple[int, int]:
        if not gpu.slices:
            raise _error("NVML_ERROR_NOT_SUPPORTED")
        return pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE

    @staticmethod
    def _slice(gpu: Gpu, index: int) -> Gpu:
        found = gpu.slices[index]
        if found is None:
            raise _error("NVML_ERROR_NOT_FOUND")
        return found


def _read(nvml: Nvml, own: frozenset[int] = frozenset(), devices: int = 1, **environ: str) -> DeviceMemory:
    (sample,) = NvmlMemory(environ, devices=devices, nvml=nvml).sample(own)
    return sample


def _uuids(nvml: Nvml, devices: int, **environ: str) -> list[str]:
    return [sample.device for sample in NvmlMemory(environ, devices=devices, nvml=nvml).sample(frozenset())]


def test_the_total_is_what_vllm_prints_on_an_h200() -> None:
    sample = _read(Nvml(Gpu("GPU-a", free=101_000)))
    assert sample.device == "GPU-a"
    assert sample.total_bytes == 143_156 * MIB
    assert sample.free_bytes == 101_000 * MIB
    assert 0.5 * GIB < sample.context_bytes < 0.7 * GIB


def test_holders_are_named_merged_and_sorted_by_size() -> None:
    gpu = Gpu("GPU-a", free=100_000)
    gpu.compute = [(os.getpid(), 1_000), (2**22 - 1, 40_000), (os.getppid(), None)]
    gpu.graphics = [(os.getpid(), 1_000)]
    sample = _read(Nvml(gpu), own=frozenset({os.getpid()}))
    assert [(ref.pid, ref.memory_bytes, ref.ours) for ref in sample.holders] == [
        (2**22 - 1, 40_000 * MIB, False),
        (os.getpid(), 1_000 * MIB, True),
        (os.getppid(), None, False),
    ]
    assert sample.own_bytes == 1_000 * MIB
    assert sample.holders[0].command == "unknown, perhaps outside this container"
    assert sample.holders[1].command.startswith("python")
    assert sample.holders[1].user


def test_own_memory_of_unknown_size_is_all_that_is_used_when_nobody_else_is_there() -> None:
    gpu = Gpu("GPU-a", free=100_000)
    gpu.compute = [(os.getpid(), None)]
    assert _read(Nvml(gpu), own=frozenset({os.getpid()})).own_bytes == 43_156 * MIB
    gpu.compute.append((os.getppid(), None))
    assert _read(Nvml(gpu), own=frozenset({os.getpid()})).own_bytes == 0


@pytest.mark.parametrize("code", ["NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_NO_PERMISSION"])
def test_process_lists_that_are_not_to_be_had_are_no_failure(code: str) -> None:
    failing = {"nvmlDeviceGetComputeRunningProcesses": code, "nvmlDeviceGetGraphicsRunningProcesses": code}
    sample = _read(Nvml(Gpu("GPU-a"), failing=failing))
    assert sample.holders == ()
    assert sample.total_bytes == 143_156 * MIB


def test_a_driver_without_the_second_memory_query_reports_no_reserved_part() -> None:
    assert _read(Nvml(Gpu("GPU-a", reserved=None))).total_bytes == 143_771 * MIB


def test_a_gpu_without_memory_of_its_own_is_read_as_host_memory() -> None:
    sample = _read(Nvml(Gpu("GPU-uma", total=None)))
    assert sample.device == "GPU-uma"
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    assert 0 < sample.total_bytes <= total


@pytest.mark.parametrize(
    ("visible", "devices", "wanted"),
    [
        (None, 1, ["GPU-aa"]),
        (None, 2, ["GPU-aa", "GPU-ab"]),
        (None, 8, ["GPU-aa", "GPU-ab", "GPU-b"]),
        ("2", 1, ["GPU-b"]),
        ("2,0", 2, ["GPU-b", "GPU-aa"]),
        (" 1 , 0 ", 1, ["GPU-ab"]),
        ("GPU-b", 1, ["GPU-b"]),
        ("GPU-ab,GPU-aa", 2, ["GPU-ab", "GPU-aa"]),
        ("1,-1,0", 3, ["GPU-ab"]),  # CUDA stops at what names nothing
        ("0,7,1", 3, ["GPU-aa"]),
        ("0,GPU-a,1", 3, ["GPU-aa"]),  # ambiguous
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str | None, devices: int, wanted: list[str]) -> None:
    nvml = Nvml(Gpu("GPU-aa"), Gpu("GPU-ab"), Gpu("GPU-b"))
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert _uuids(nvml, devices, **environ) == wanted


def test_mig_slices_are_devices_and_stand_for_their_gpu() -> None:
    cut = Gpu("GPU-a")
    cut.slices = [Gpu("MIG-1", 20_000, 0, 19_000), None, Gpu("MIG-2", 40_000, 0, 39_000)]
    nvml = Nvml(cut, Gpu("GPU-b"))
    assert _uuids(nvml, 1, CUDA_VISIBLE_DEVICES="MIG-2") == ["MIG-2"]
    assert _uuids(nvml, 2, CUDA_VISIBLE_DEVICES="0,1") == ["MIG-1", "GPU-b"]
    assert _read(nvml, CUDA_VISIBLE_DEVICES="MIG-2").total_bytes == 40_000 * MIB


@pytest.mark.parametrize(
    ("nvml", "environ", "text"),
    [
        (Nvml(failing={"nvmlInit": "NVML_ERROR_LIBRARY_NOT_FOUND"}), {}, "no NVIDIA driver: "),
        (Nvml(failing={"nvmlInit": "NVML_ERROR_DRIVER_NOT_LOADED"}), {}, "no NVIDIA driver: "),
        (Nvml(), {}, "NVML finds no GPU"),
        (Nvml(Gpu("GPU-a")), {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' names no GPU of this machine"),
        (Nvml(Gpu("GPU-a")), {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES='-1' names no GPU of this machine"),
    ],
)
def test_where_no_gpu_can_be_used_auto_reads_host_memory_and_nvml_says_why(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml, environ: dict[str, str], text: str
) -> None:
    monkeypatch.setattr("supervisord_vllm.host.nvml._pynvml", lambda: nvml)
    assert memory.open_source("auto", environ).name == "host"
    with pytest.raises(NoDriver) as raised:
        memory.open_source("nvml", environ)
    assert text in str(raised.value)


@pytest.mark.parametrize("declared", ["3", "GPU-zz", "MIG-1", "GPU-a\x1b[31m"])
def test_a_gpu_that_is_not_there_is_a_mistake_not_a_wish_for_host_memory(
    monkeypatch: pytest.MonkeyPatch, declared: str
) -> None:
    monkeypatch.setattr("supervisord_vllm.host.nvml._pynvml", lambda: Nvml(Gpu("GPU-a")))
    with pytest.raises(MemoryUnavailable, match=r"CUDA_VISIBLE_DEVICES='.*' names no GPU of this machine") as raised:
        memory.open_source("auto", {"CUDA_VISIBLE_DEVICES": declared})
    assert str(raised.value).isprintable()


def test_a_driver_that_is_broken_is_never_mistaken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Nvml(failing={"nvmlInit": "NVML_ERROR_LIB_RM_VERSION_MISMATCH"})
    monkeypatch.setattr("supervisord_vllm.host.nvml._pynvml", lambda: broken)
    with pytest.raises(MemoryUnavailable, match=r"NVML does not start: .*mismatch"):
        memory.open_source("auto", {})


def test_a_card_that_vanished_is_unavailable_by_name() -> None:
    nvml = Nvml(Gpu("GPU-a"))
    source = NvmlMemory({}, nvml=nvml)
    nvml.failing["nvmlDeviceGetMemoryInfo"] = "NVML_ERROR_GPU_IS_LOST"
    with pytest.raises(MemoryUnavailable, match="NVML: GPU is lost"):
        source.sample(frozenset())


def test_the_bus_ids_are_those_of_the_gpus_that_the_engine_uses_in_the_kernels_form() -> None:
    first, second = Gpu("GPU-aa"), Gpu("GPU-bb")
    second.bus = 0xC1
    assert NvmlMemory({}, devices=1, nvml=Nvml(first, second)).bus_ids == {"0000:3b:00"}
    assert NvmlMemory({"CUDA_VISIBLE_DEVICES": "1"}, devices=1, nvml=Nvml(first, second)).bus_ids == {"0000:c1:00"}
    assert NvmlMemory({}, devices=2, nvml=Nvml(first, second)).bus_ids == {"0000:3b:00", "0000:c1:00"}
    first.slices = [Gpu("MIG-aa1"), Gpu("MIG-aa2")]
    assert NvmlMemory({"CUDA_VISIBLE_DEVICES": "MIG-aa2"}, nvml=Nvml(first, second)).bus_ids == {"0000:3b:00"}


def test_a_driver_that_tells_no_bus_id_is_no_failure() -> None:
    nvml = Nvml(Gpu("GPU-aa"), failing={"nvmlDeviceGetPciInfo": "NVML_ERROR_NOT_SUPPORTED"})
    assert NvmlMemory({}, nvml=nvml).bus_ids == frozenset()


@pytest.mark.parametrize("error", ["NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED"])
def test_a_gpu_that_is_lost_has_vanished_and_a_silent_driver_has_not(error: str) -> None:
    nvml = Nvml(Gpu("GPU-aa"))
    source = NvmlMemory({}, nvml=nvml)
    nvml.failing["nvmlDeviceGetMemoryInfo"] = error
    with pytest.raises(MemoryUnavailable) as lost:
        source.sample(frozenset())
    assert lost.value.vanished
    nvml.failing["nvmlDeviceGetMemoryInfo"] = "NVML_ERROR_TIMEOUT"
    with pytest.raises(MemoryUnavailable) as mute:
        source.sample(frozenset())
    assert not mute.value.vanished
