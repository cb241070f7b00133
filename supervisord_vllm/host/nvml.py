"""GPU memory through NVML (`pynvml` of nvidia-ml-py), as vLLM will see it.

Contract: total = NVML's total less its reserved part, which is what CUDA and so vLLM report as total; free is NVML's.
(On an H200 with driver 580: NVML 143,771 MiB, reserved 615; total and free equal cuMemGetInfo's to the byte.) "Not
supported" is a value: a driver without the second version of the memory query reports no reserved part, a process whose
size the driver does not know has ``memory_bytes`` None, a GPU without memory of its own (unified memory) is read as
host memory. Every call may block in the driver: use a `memory.Sampler`.

CUDA_VISIBLE_DEVICES is read as CUDA reads it: indices or UUIDs (a unique beginning is enough), up to the first entry
that names nothing; only the first ``devices`` are used by the engine. Indices are taken in PCI order, as NVML counts
them; CUDA does so with CUDA_DEVICE_ORDER=PCI_BUS_ID and wherever all GPUs are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import cast

from supervisord_vllm.core.facts import DeviceMemory, ProcessRef
from supervisord_vllm.host import procfs
from supervisord_vllm.host.hostmemory import HostMemory
from supervisord_vllm.host.kernel import bus_id
from supervisord_vllm.host.memory import MemoryUnavailable
from supervisord_vllm.redaction import printable

CONTEXT_BYTES = 6 * (1 << 30) // 10
"""First guess of what our engine's CUDA context takes before vLLM looks at free memory (0.51 GiB seen on an H200)."""
_NONE = ("", "-1", "void", "none")
"""How CUDA_VISIBLE_DEVICES says that no GPU is meant; what else names nothing is a mistake."""
_ABSENT = ("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_FUNCTION_NOT_FOUND", "NVML_ERROR_ARGUMENT_VERSION_MISMATCH")

_LOST = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")


class GpuVanished(MemoryUnavailable):
    """A GPU that was there is lost, or waits for a reset: nothing can be started on it."""

    vanished = True


class NoDriver(MemoryUnavailable):
    """There is no NVIDIA driver here, or no GPU that the engine may use."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or a MIG slice. ``handle`` is NVML's."""

    uuid: str
    name: str
    handle: object
    bus_id: str = ""
    """PCI address as the kernel's log writes it; a MIG slice has its GPU's. Empty where it is not told."""


def _pynvml() -> ModuleType:
    import pynvml

    return cast(ModuleType, pynvml)


class NvmlMemory:
    """The GPUs that the engine will use. ``nvml`` is the module to call (tests pass one of documented return codes)."""

    name = "nvml"

    def __init__(self, environ: Mapping[str, str], *, devices: int = 1, nvml: ModuleType | None = None) -> None:
        self._nvml = nvml or _pynvml()
        self._host = HostMemory()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            if self._is(error, "NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED"):
                raise NoDriver(f"no NVIDIA driver: {error}") from error
            raise MemoryUnavailable(f"NVML does not start: {error}") from error
        try:
            self.gpus = self._visible(environ.get("CUDA_VISIBLE_DEVICES"))[: max(1, devices)]
        except self._nvml.NVMLError as error:
            raise self._failed(error) from error
        self.bus_ids = frozenset(gpu.bus_id for gpu in self.gpus if gpu.bus_id)
        """PCI addresses of the GPUs, as the kernel's log writes them."""

    def sample(self, own_pids: frozenset[int]) -> tuple[DeviceMemory, ...]:
        """One look at every GPU that the engine will use."""
        try:
            return tuple(self._sample(gpu, own_pids) for gpu in self.gpus)
        except self._nvml.NVMLError as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> MemoryUnavailable:
        kind = GpuVanished if self._is(error, *_LOST) else MemoryUnavailable
        return kind(f"NVML: {error}")

    def _is(self, error: Exception, *names: str) -> bool:
        return any(getattr(error, "value", None) == getattr(self._nvml, name) for name in names)

    def _sample(self, gpu: Gpu, own_pids: frozenset[int]) -> DeviceMemory:
        try:
            info = self._nvml.nvmlDeviceGetMemoryInfo(gpu.handle, version=self._nvml.nvmlMemory_v2)
            reserved = int(info.reserved)
        except self._nvml.NVMLError as error:
            if not self._is(error, *_ABSENT):
                raise
            try:
                info, reserved = self._nvml.nvmlDeviceGetMemoryInfo(gpu.handle), 0
            except self._nvml.NVMLError as second:
                if not self._is(second, *_ABSENT):
                    raise
                # No memory of its own: what the CPU has is what the GPU has.
                return replace(self._host.sample(own_pids)[0], device=gpu.uuid, context_bytes=CONTEXT_BYTES)
        total, free = int(info.total) - reserved, int(info.free)
        used_by = self._used_by(gpu.handle)
        own = sum(used_by[pid] or 0 for pid in used_by.keys() & own_pids)
        if used_by and used_by.keys() <= own_pids and None in used_by.values():
            own = max(own, total - free)  # sizes are not known, but nobody else is there
        holders = [
            procfs.describe(pid, memory_bytes=size, ours=pid in own_pids)
            for pid, size in sorted(used_by.items(), key=lambda item: (-(item[1] or 0), item[0]))
        ]
        return DeviceMemory(
            device=gpu.uuid,
            total_bytes=total,
            free_bytes=min(free, total),
            context_bytes=CONTEXT_BYTES,
            own_bytes=own,
            holders=tuple(self._named(holder) for holder in holders),
        )

    @staticmethod
    def _named(holder: ProcessRef) -> ProcessRef:
        """In a container NVML gives pids of the host: there is no such process to describe."""
        return holder if holder.command else replace(holder, command="unknown, perhaps outside this container")

    def _used_by(self, handle: object) -> dict[int, int | None]:
        """Bytes by pid. A process with a compute and a graphics context is listed twice, with the same size."""
        found: dict[int, int | None] = {}
        for query in (
            self._nvml.nvmlDeviceGetComputeRunningProcesses,
            self._nvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            try:
                processes = query(handle)
            except self._nvml.NVMLError as error:
                if not self._is(error, *_ABSENT, "NVML_ERROR_NO_PERMISSION"):
                    raise
                continue
            for process in processes:
                size, before = process.usedGpuMemory, found.get(process.pid)
                found[process.pid] = before if size is None else max(int(size), before or 0)
        return found

    def _visible(self, declared: str | None) -> list[Gpu]:
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        if not handles:
            raise NoDriver("NVML finds no GPU")
        if declared is None:
            return [self._gpu(handle) for handle in handles]
        chosen: list[Gpu] = []
        for entry in declared.split(","):
            found = self._named_by(entry.strip(), handles)
            if found is None:
                break
            chosen.append(found)
        if not chosen:
            text = f"CUDA_VISIBLE_DEVICES='{printable(declared[:200])}' names no GPU of this machine"
            raise NoDriver(text) if declared.strip() in _NONE else MemoryUnavailable(text)
        return chosen

    def _named_by(self, entry: str, handles: list[object]) -> Gpu | None:
        if entry.isascii() and entry.isdigit():
            index = int(entry)
            return self._gpu(handles[index]) if index < len(handles) else None
        if not entry.startswith(("GPU-", "MIG-")):
            return None
        if entry.startswith("MIG-"):
            candidates = [slice_ for handle in handles for slice_ in self._slices(handle)]
        else:
            candidates = handles
        uuids = [self._text(self._nvml.nvmlDeviceGetUUID(handle)) for handle in candidates]
        matching = [handle for handle, uuid in zip(candidates, uuids, strict=True) if uuid.startswith(entry)]
        return self._gpu(matching[0]) if len(matching) == 1 else None

    def _gpu(self, handle: object) -> Gpu:
        """The device that CUDA would open: of a GPU that is cut into MIG slices, the first slice."""
        slices = self._slices(handle)
        handle = slices[0] if slices else handle
        uuid, name = self._nvml.nvmlDeviceGetUUID(handle), self._nvml.nvmlDeviceGetName(handle)
        return Gpu(self._text(uuid), self._text(name), handle, self._bus_id(handle))

    def _bus_id(self, handle: object) -> str:
        """The GPU's PCI address; empty where the driver does not tell."""
        try:
            if self._text(self._nvml.nvmlDeviceGetUUID(handle)).startswith("MIG-"):
                handle = self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            return bus_id(self._text(self._nvml.nvmlDeviceGetPciInfo(handle).busId))
        except self._nvml.NVMLError as error:
            if self._is(error, *_LOST):
                raise
            return ""

    def _slices(self, handle: object) -> list[object]:
        try:
            if self._nvml.nvmlDeviceGetMigMode(handle)[0] != self._nvml.NVML_DEVICE_MIG_ENABLE:
                return []
            count = self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except self._nvml.NVMLError as error:
            if self._is(error, *_ABSENT, "NVML_ERROR_INVALID_ARGUMENT"):
                return []
            raise
        found = [self._slice(handle, index) for index in range(count)]
        return [one for one in found if one is not None]

    def _slice(self, handle: object, index: int) -> object | None:
        try:
            found: object = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except self._nvml.NVMLError as error:
            if self._is(error, "NVML_ERROR_NOT_FOUND", "NVML_ERROR_INVALID_ARGUMENT"):
                return None
            raise
        return found

    @staticmethod
    def _text(value: str | bytes) -> str:
        return value.decode() if isinstance(value, bytes) else value
