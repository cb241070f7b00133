"""Knowledge: the observations that hold for the next launch, under the present card, version and policy."""

from __future__ import annotations

from supervisord_vllm.core.ledger import room
from supervisord_vllm.core.levers import KV_DTYPE, MM_LIMITS, WEIGHTS, LeverValue
from supervisord_vllm.core.observations import Known, holding
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import Launch, State


def setting_of(launch: Launch) -> str:
    """Card and vLLM version of a launch; empty where one of them is not known."""
    version, devices = launch.ledger.numbers.get("version"), launch.gate_devices
    if not version or not devices:
        return ""
    return f"vllm {version}, {len(devices)} x {max(device.total_bytes for device in devices)} bytes"


def ranks(policy: Policy) -> dict[str, tuple[LeverValue, ...]]:
    """Named values in the order of the policy: what is declared asks for most, each alternative for less."""
    order: dict[str, tuple[LeverValue, ...]] = {}
    for name, default in ((WEIGHTS, None), (KV_DTYPE, "auto"), (MM_LIMITS, None)):
        rung, declared = policy.rung(name), policy.declared.get(name, default)
        if rung is not None and declared is not None:
            order[name] = (declared, *rung.use)
    return order


def free_for(state: State) -> int | None:
    """Bytes that are free for the next launch, as last seen on the tightest device."""
    launch = state.launch
    if state.gate is not None and state.gate.samples:
        seen = room((devices for _, devices in state.gate.samples), state.contexts)
    elif launch is not None:
        seen = launch.room or room((launch.gate_devices,), state.contexts)
    else:
        seen = None
    return seen.free if seen is not None else None


def known(policy: Policy, state: State, now_ns: int) -> Known:
    """What is known for the next launch."""
    setting = setting_of(state.launch) if state.launch is not None else ""
    return holding(state.observations, ranks(policy), state.wall_s(now_ns), setting, free_for(state))
