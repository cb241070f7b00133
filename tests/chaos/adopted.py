"""Seeded deaths of the daemon over one real vLLM engine (CPU build): killed or upgraded while streams run.

One engine serves all rounds. Each demands the same engine (launch, pid, start time), proven, and streams that end as
they should; at the end every line of the engine's output was copied once. ``adopted.py --rounds 50 [--seed N]``; it
installs the engine if it is not there, as `make test-real` does.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0:1] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from real.policies import policy
from real.sandbox import Sandbox, sandbox
from real.test_adoption import SMALL_KV, assert_copied_once, clients, engine_of, killed, upgraded
from real.vllm_cpu.install import ensure


def rounds(box: Sandbox, count: int, rng: random.Random) -> None:
    """So many deaths of the daemon; an assertion says which one was noticed."""
    first = box.wait_serving(launch=1)
    for number in range(1, count + 1):
        verb = rng.choice((killed, upgraded))
        with clients(box, rng.randrange(1, 4)) as streams:
            for _ in range(rng.randrange(60)):
                streams[0].event()
            time.sleep(rng.uniform(0, 1))  # the moment is what is drawn
            verb(box)
            after = box.wait_serving(launch=1)
        assert engine_of(after) == engine_of(first), f"round {number}, {verb.__name__}"
        assert after["proven"], f"round {number}, {verb.__name__}"
        print(f"round {number}: {verb.__name__}, the same engine", flush=True)
    box.cli("stop")
    box.wait(lambda status: status["state"] == "stopped", 60, "the stop")
    assert_copied_once(box, 1)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="Deaths of the daemon over one real engine.")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    vllm = ensure()
    began = time.monotonic()
    with sandbox() as box:
        box.start(policy(box, vllm, levers={"max-model-len": 1024}, args=SMALL_KV, fork=False))
        rounds(box, options.rounds, random.Random(options.seed))
    print(f"{options.rounds} rounds, seed {options.seed}: {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
