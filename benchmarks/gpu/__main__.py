"""``python -m benchmarks.gpu --rig gpu --model DIR --out DIR [--faults 0-3] [--seconds 540] [--again]``

Runs the faults (0 is the comparison of NVML with CUDA) one after the other. Each leaves a folder OUT/fault-N; one that
is there is not run again, so a run that was cut short is gone on with. A fault is only begun while enough of
``--seconds`` is left for it. ``--table DIR...`` prints the table of what lies there. Status 0 when every fault that was
asked for lies there and every check holds.

    --rig gpu      a real card; --command names vLLM's (default: this Python's), --model a model (dummy weights)
    --rig cpu      vLLM's CPU build; run the whole command in a memory cgroup of 6 GiB
    --rig standin  the stand-in engine and its simulated card: a dry run of a minute
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import rig as rigs
from benchmarks.gpu.faults import Fault, NotHere, Story, every
from benchmarks.gpu.neighbour import NeighbourError
from benchmarks.gpu.result import Names, Results, table, told
from benchmarks.gpu.supervised import BenchError, Supervised
from benchmarks.gpu.timeline import Json
from benchmarks.gpu.truth import beside_cuda, beside_engine, nvidia_smi, sampled
from supervisord_vllm.host.memory import MemoryUnavailable, open_source

VLLM = f"{sys.executable} -m vllm.entrypoints.cli.main serve"
TRUTH_NEEDS_S = 45.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Memory faults on a real card.")
    parser.add_argument("--rig", choices=("gpu", "cpu", "standin"), default="gpu")
    parser.add_argument("--model", default=rigs.STANDIN_MODEL)
    parser.add_argument("--command", default=VLLM, help="vLLM's own command up to the model, one string")
    parser.add_argument("--out", type=Path, help="where results lie and go")
    parser.add_argument("--faults", default="0-6", help="such as 1,4-6")
    parser.add_argument("--seconds", type=float, default=540.0, help="of the whole run")
    parser.add_argument("--again", action="store_true", help="also what lies there already")
    parser.add_argument("--table", nargs="+", type=Path, metavar="DIR", help="print what lies in these folders")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(options.table))
        return 0
    if options.out is None:
        parser.error("--out is needed")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vsb-", dir="/tmp") as folder:  # short: a socket lies in it
        bench = Bench(options, Path(folder), began + options.seconds)
        went = [bench.run(number) for number in _numbers(options.faults)]
    print(f"\n{table([options.out])}\n\n{time.monotonic() - began:.0f} s in all")
    return 0 if all(went) else 1


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


class Bench:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace, folder: Path, deadline: float) -> None:
        self.folder, self.deadline, self.again = folder, deadline, options.again
        if options.rig == "standin":
            self.rig = rigs.standin(folder / "card")
        else:
            make = rigs.gpu if options.rig == "gpu" else rigs.cpu
            self.rig = make(shlex.split(options.command), options.model)
        smi = nvidia_smi() if options.rig == "gpu" else None
        self.uuid = str(smi["uuid"]) if smi and self.rig.by_uuid else None
        names: Names = {str(folder): "<run>", options.model: "<model>", sys.executable: "<python>"}
        shown = [word if word != str(options.out) else "OUT" for word in sys.argv[1:]]
        self.results = Results(options.out, names, f"python -m benchmarks.gpu {' '.join(shown)}", self.rig.name, smi)

    def run(self, number: int) -> bool:
        """One fault, unless its result lies there; whether it went as it must."""
        if self.results.there(number) and not self.again:
            return self.results.good(number)
        needs = TRUTH_NEEDS_S if number == 0 else every(None)[number].needs_s
        left = self.deadline - time.monotonic()
        if self.rig.name == "gpu" and left < needs:
            print(f"fault {number}: not begun, {left:.0f} s are left and it needs {needs:.0f} s", flush=True)
            return False
        began = time.monotonic()
        good = self._truth() if number == 0 else self._fault(every(self.uuid)[number])
        print(
            f"fault {number}: {time.monotonic() - began:.0f} s, {'as it must' if good else 'NOT as it must'}",
            flush=True,
        )
        return good

    def _truth(self) -> bool:
        if self.rig.name != "gpu":
            print("fault 0: no card to compare", flush=True)
            return True
        try:
            found = beside_cuda({})
        except (MemoryUnavailable, NeighbourError, ValueError, OSError) as error:
            print(f"fault 0: {error}", flush=True)
            return False
        self.results.write_truth(found)
        print(json.dumps(found, indent=1), flush=True)
        return True

    def _fault(self, fault: Fault) -> bool:
        observed: Json = {}

        def observe(what: str, daemon: Supervised) -> None:
            try:
                source = open_source(self.rig.memory, {**self.rig.env})
                own = daemon.pids()
                observed[what] = (
                    beside_engine(source, own)
                    if self.rig.name == "gpu"
                    else {"sampler": sampled(source, frozenset(own))}
                )
            except MemoryUnavailable as unavailable:
                observed[what] = str(unavailable)

        story = Story(self.rig, self.folder / f"f{fault.number}", self.deadline, observe)
        trouble = ""
        try:
            fault.run(story)
        except NotHere as why:
            print(f"fault {fault.number}: not run: {why}", flush=True)
            return True
        except (BenchError, NeighbourError, OSError) as error:
            trouble = str(error)
        except Exception:  # noqa: BLE001 - a mistake of ours must not lose the results of the other faults
            trouble = traceback.format_exc()
        if story.daemon is None:
            print(f"fault {fault.number}: {trouble}", flush=True)
            return False
        observe("after the daemon's end", story.daemon)
        result = self.results.write(fault, story, observed, trouble)
        print(told(result), flush=True)
        return bool(result["as_it_must"])


if __name__ == "__main__":
    sys.exit(main())
