"""The proof of a launch on real vLLM: what it sends is answered, and an engine that only looks healthy is rolled back.

This suite's engines die at their first request by the fault plugin's SIGILL. bf16 in eager mode does the same on a
processor with AMX, without any plugin; it cannot be asked for where there is none.
"""

from __future__ import annotations

import pytest

from real.cage import Cage
from real.policies import policy
from real.sandbox import START, Json, Sandbox
from real.vllm_cpu.install import VllmCpu

pytestmark = pytest.mark.real

SMALL_KV = ("--kv-cache-memory-bytes", "64M")
SEQS = {"lever": "max-num-seqs", "factor": 0.5, "min": 1, "max": 8}


def decision_about(box: Sandbox, launch: int) -> Json:
    """The decision about one launch."""
    (found,) = [one for one in box.history()["decisions"] if one["launch"] == launch and one["kind"] != "none"]
    assert isinstance(found, dict)
    return found


def test_a_launch_is_proven_by_one_token_then_a_burst_then_a_soak(vllm: VllmCpu, box: Sandbox) -> None:
    levers = {"max-model-len": 512, "max-num-seqs": 8}
    box.start(policy(box, vllm, levers=levers, args=SMALL_KV, env={"VLLM_API_KEY": "sesame"}, burst=None))
    status = box.wait_serving(launch=1)
    proof = status["proof"]
    assert proof["part"] is None
    assert [proof[part]["percent"] for part in ("canary", "burst", "soak")] == [100, 100, 100]
    burst = proof["burst"]
    assert (burst["requests"], burst["answered"], burst["failed"], burst["refused"]) == (8, 8, 0, 0), burst
    assert 0 < burst["first_token_s"] <= burst["seconds"]
    assert proof["canary"]["first_token_s"] > 0
    assert proof["soak"]["finding"] is None
    assert proof["soak"]["memory"][0]["own_bytes"] > 100 << 20
    assert box.history()["decisions"] == []
    assert "8 of 8 at once answered" in " ".join(box.cli("status").split())


def test_an_engine_that_is_healthy_and_dies_at_its_first_request_is_rolled_back(vllm: VllmCpu, box: Sandbox) -> None:
    fault = box.root / "fault"
    env = {"VLLMTEST_FAULT": "ill_step:1", "VLLMTEST_FAULT_WHILE": str(fault)}
    levers = {"max-model-len": 512, "max-num-seqs": 4}
    box.start(policy(box, vllm, levers=levers, ladder=[SEQS], args=SMALL_KV, env=env))
    box.wait_serving(launch=1)
    fault.touch()
    box.cli("step", "max_num_seqs", "down")
    failed = box.wait(lambda status: (status["decision"] or {}).get("launch") == 2, 2 * START, "launch 2 to be judged")
    fault.unlink()
    assert "Its proof failed in the canary, its first request." in failed["decision"]["sentence"]
    status = box.wait_serving(launch=3, seconds=2 * START)

    assert status["launch"]["levers"]["max_num_seqs"] == 4
    assert "Application startup complete" in box.log(2), "it was healthy"
    assert box.exit_fact(2)["code"] == 0
    (move,) = decision_about(box, 2)["moves"]
    assert (move["lever"], move["from"], move["to"], move["how"]) == ("max_num_seqs", 2, 4, "restored")
    launches = box.history()["launches"]
    assert [launch["proven_at"] is not None for launch in launches] == [True, False, True]
    assert launches[1]["ready_at"] is None


def test_memory_that_runs_out_once_four_requests_run_at_once_is_found_by_the_burst_and_rolled_back(
    vllm: VllmCpu, six_gib: Cage, box: Sandbox
) -> None:
    """In the cage, where no other program of this machine can be the neighbour that is to blame."""
    env = {"VLLMTEST_FAULT": "oom_at_once:4", "VLLMTEST_STEP_MS": "20"}
    levers = {"gpu-memory-utilization": 0.50, "max-model-len": 512, "max-num-seqs": 2}
    text = policy(box, vllm, levers=levers, ladder=[SEQS], env=env, burst=None)
    box.start(text, wrap=six_gib.command)
    box.wait_serving(launch=1)
    box.cli("step", "max_num_seqs", "up")
    status = box.wait_serving(launch=3, seconds=3 * START)

    assert status["launch"]["levers"]["max_num_seqs"] == 2
    assert status["proof"]["burst"]["answered"] == 2
    decision = decision_about(box, 2)
    assert decision["kind"] == "oom_runtime"
    assert "ran out of GPU memory while serving (tried 20 MiB, 2 MiB free)" in decision["sentence"]
    assert "Its proof failed in the burst: " in decision["sentence"]
    assert "of 4 requests failed" in decision["sentence"]
    launches = box.history()["launches"]
    assert launches[1]["ready_at"] is not None, "one token was answered"
    assert [launch["proven_at"] is not None for launch in launches] == [True, False, True]
    assert six_gib.oom_kills == 0
