"""Witnesses outside the engine's output: the kernel's log and counters, the GPU driver, the progress of the engine.

Each is kept with the launch it belongs to and speaks when a failure is judged; alone it never ends an engine that
serves, but for `Stalled`, which is a failure by itself. Nothing of another launch's GPU or process is kept.
"""

from __future__ import annotations

from dataclasses import replace

from supervisord_vllm.core.diagnosis import Action, Diagnosis, Evidence, Kind
from supervisord_vllm.core.facts import Cleaned, DevicesSeen, KernelSeen, OomKilled, Stalled
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import Launch, State, StateName
from supervisord_vllm.core.steps import Step, to_stopping

KEPT = 8
"""Kernel lines that are kept for one launch; the first are the nearest to a cause."""
HARDWARE_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 110, 119, 120, 136, 140, 143, 154})
"""Faults of a card (NVIDIA's Xid catalogue). Others, above all 13, 31, 43 and 45, are made by a program's own kernels:
evidence, never a broken card."""

_MAY_BE_KILLED = frozenset({Kind.NONE, Kind.UNKNOWN, Kind.ENGINE_DEAD, Kind.WORKER_DIED})
_MAY_BE_THE_CARD = _MAY_BE_KILLED | {Kind.CUDA_FAULT, Kind.ENGINE_HUNG, Kind.NCCL_HANG, Kind.STARTUP_WEDGED}


def stalled(policy: Policy, state: State, fact: Stalled) -> Step:
    """→ stopping: it hangs, or its start is wedged."""
    starting = state.name is StateName.STARTING
    if starting is not (fact.what == "wedged"):
        return state, ()
    kind = Kind.STARTUP_WEDGED if starting else Kind.ENGINE_HUNG
    return to_stopping(state, fact.at_ns, "failure", kind, fact.text)


def kernel_seen(policy: Policy, state: State, fact: KernelSeen) -> Step:
    """The kernel said something about a GPU or about memory."""
    launch = state.launch
    if launch is None or fact.ours is False or len(launch.kernel) >= KEPT:
        return state, ()
    return replace(state, launch=replace(launch, kernel=(*launch.kernel, fact))), ()


def oom_killed(policy: Policy, state: State, fact: OomKilled) -> Step:
    """The kernel ended processes of our cgroup for memory."""
    launch = state.launch
    if launch is None or fact.count <= launch.oom_kills:
        return state, ()
    return replace(state, launch=replace(launch, oom_kills=fact.count)), ()


def devices_seen(policy: Policy, state: State, fact: DevicesSeen) -> Step:
    """Device memory cannot be read any more, or again."""
    after = replace(state, memory_error=fact.error)
    if state.launch is None or not fact.vanished:
        return after, ()
    return replace(after, launch=replace(state.launch, vanished=fact.error)), ()


def cleaned(policy: Policy, state: State, fact: Cleaned) -> Step:
    """Leftovers of dead owners were moved aside: not again within this incident."""
    return replace(state, incident=replace(state.incident, cleaned=True)), ()


def witnessed(diagnosis: Diagnosis, launch: Launch) -> Diagnosis:
    """The verdict with what was seen outside: a death without a cause in the log gets the kernel's, the rest gets
    evidence. The order: a broken card explains everything, a kill for memory explains a death."""
    broken = [line for line in launch.kernel if _of_the_card(line)]
    evidence = tuple(Evidence(0, "kernel", line.text) for line in launch.kernel)
    if launch.vanished is not None:
        evidence = (*evidence, Evidence(0, "driver", launch.vanished))
    if diagnosis.kind in _MAY_BE_THE_CARD and (broken or launch.vanished is not None):
        number = next((line.number for line in broken if line.number is not None), None)
        return replace(
            diagnosis,
            kind=Kind.GPU_HW_FAULT,
            action=Action.STOP_OPERATOR,
            numbers=diagnosis.numbers if number is None else {**diagnosis.numbers, "xid": number},
            evidence=(*evidence, *diagnosis.evidence),
            signature=f"kernel-{broken[0].kind}-{number}" if broken else "gpu-vanished",
            summary="The driver reports a fault of a GPU that this engine uses.",
            advice="Look at `dmesg` and `nvidia-smi -q`; drain the node or reset the GPU before the next start.",
        )
    killed = launch.oom_kills > 0 or any(line.kind == "oom_killer" and line.ours for line in launch.kernel)
    count = max(1, launch.oom_kills)
    text = f"the kernel's OOM killer ended {count} process(es) of our cgroup: host memory or its limit ran out"
    if diagnosis.kind is Kind.HOST_OOM and killed:
        return replace(diagnosis, evidence=(Evidence(0, "supervisor", text), *evidence, *diagnosis.evidence))
    if diagnosis.kind is Kind.GPU_HW_FAULT:
        return replace(diagnosis, evidence=(*evidence, *diagnosis.evidence))
    if diagnosis.kind in _MAY_BE_KILLED and killed:
        return replace(
            diagnosis,
            kind=Kind.HOST_OOM,
            action=Action.STOP_EXPLAIN,
            numbers={**diagnosis.numbers, "oom_kills": count},
            evidence=(Evidence(0, "supervisor", text), *evidence, *diagnosis.evidence),
            signature="kernel-oom-killer",
            summary="The kernel ended an engine process because host memory ran out.",
            advice="Raise the memory limit (MemoryMax, the container's limit), or take less host memory"
            " (--swap-space, CPU offload, fewer workers).",
        )
    return replace(diagnosis, evidence=(*diagnosis.evidence, *evidence)) if evidence else diagnosis


def _of_the_card(line: KernelSeen) -> bool:
    """Whether a line of the kernel tells of broken hardware; a switch says "Non-fatal" of what it survived."""
    if line.kind == "xid":
        return line.number in HARDWARE_XIDS
    return line.kind == "sxid" and "Fatal" in line.text and "Non-fatal" not in line.text
