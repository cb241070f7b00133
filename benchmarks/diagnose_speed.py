"""How fast a log is judged, against a yardstick in the same run: a loop with one search of five literals per line.

    python benchmarks/diagnose_speed.py [LINES]      (default 1,000,000)

Three ordinary logs: what a server prints under load (access lines, one load line in eleven), the same tagged and in a
journal, and a traceback repeated. Prints lines per second and the ratio to the yardstick; absolute numbers belong to
the machine, the ratio to the program. Also: memory while a large file is read, and the time of the command itself.
"""

from __future__ import annotations

import io
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from supervisord_vllm.core.diagnosis import Diagnosis
from supervisord_vllm.engine.classifier import Classifier
from supervisord_vllm.engine.launches import Launches
from supervisord_vllm.engine.logfile import blocks

ACCESS = b'INFO:     127.0.0.1:%d - "POST /v1/chat/completions HTTP/1.1" 200 OK'
LOAD = (
    b"INFO 12-01 01:%02d:%02d [loggers.py:271] Engine 000: Avg prompt throughput: 402.%d tokens/s, Avg generation "
    b"throughput: 61.7 tokens/s, Running: 9 reqs, Waiting: 0 reqs, GPU KV cache usage: 8.2%%, Prefix cache "
    b"hit rate: 0.0%%"
)
FIVE = re.compile(rb"ERROR|Traceback|out of memory|Killed|died unexpectedly")


def serving(count: int, prefix: bytes = b"") -> list[bytes]:
    """A serving engine's log."""
    lines = [b"(APIServer pid=1) INFO:     Application startup complete."]
    for number in range(count):
        text = LOAD % (number // 60 % 60, number % 60, number % 10) if number % 11 == 0 else ACCESS % (number % 60000)
        lines.append(prefix + text)
    return lines


def tracebacks(count: int) -> list[bytes]:
    """Errors, one after another."""
    head = b"(EngineCore pid=2) ERROR 12-01 01:00:00 [core.py:1204] "
    block = [
        head + b"Traceback (most recent call last):",
        head + b'  File "/usr/lib/python3.12/site-packages/vllm/v1/worker/gpu_worker.py", line 100, in execute_model',
        head + b"    output = self.model_runner.execute_model(scheduler_output)",
        head + b"ValueError: something that nobody knows",
    ]
    return [block[number % 4] for number in range(count)]


def rate(work: Callable[[], object], count: int) -> float:
    """Lines per second of CPU time (the machine may be shared), the best of three runs."""
    best = 0.0
    for _ in range(3):
        begin = time.process_time()
        work()
        best = max(best, count / (time.process_time() - begin))
    return best


def judge(stream: Any) -> Diagnosis:  # noqa: ANN401 - a file, or something that reads like one
    """As `diagnose` does."""
    launches = Launches()
    for block in blocks(stream):
        launches.feed_block(block)
    return launches.verdict()


def live(lines: list[bytes]) -> None:
    """As the daemon does, line by line."""
    classifier = Classifier()
    for line in lines:
        classifier.feed(line)


def yardstick(lines: Iterable[bytes]) -> int:
    """One search of five literals per line."""
    search = FIVE.search
    found = 0
    for line in lines:
        if search(line):
            found += 1
    return found


def main() -> None:
    """Measure and print."""
    count = int(next((word for word in sys.argv[1:] if word.isdigit()), 1_000_000))
    journal = b"Jan 01 18:30:11 host vllm[8707]: (APIServer pid=8707) "
    for name, lines in (
        ("serving, untagged", serving(count)),
        ("serving, tagged", serving(count, b"(APIServer pid=1) ")),
        ("serving, in a journal", serving(count, journal)),
        ("tracebacks", tracebacks(count // 10)),
    ):
        blob = b"\n".join(lines)
        ours = rate(lambda blob=blob: judge(io.BytesIO(blob)), len(lines))  # type: ignore[misc]
        theirs = rate(lambda blob=blob: yardstick(blob.split(b"\n")), len(lines))  # type: ignore[misc]
        alive = rate(lambda lines=lines: live(lines), len(lines))  # type: ignore[misc]
        print(
            f"{name:24} {ours:>9,.0f} lines/s (live {alive:>9,.0f})   yardstick {theirs:>9,.0f}   "
            f"ratio {ours / theirs:.2f} (live {alive / theirs:.2f})"
        )
    if "--all" in sys.argv:
        big()
    start_up()


def big(size: int = 1 << 30) -> None:
    """A file of this size, made as it is read; what the process grew by."""
    block = b"\n".join(serving(100_000, b"(APIServer pid=1) ")) + b"\n"

    class Stream(io.RawIOBase):
        left = size

        def read(self, amount: int = -1) -> bytes:
            self.left -= amount
            at = (size - self.left) % (len(block) - amount)
            return b"" if self.left < 0 else block[at : at + amount]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    judge(Stream())
    took = time.perf_counter() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"1 GiB: {took:.1f} s, peak memory grew by {grown / 1024:.1f} MiB")


def start_up() -> None:
    """The whole command on a short file, over ``python -c 'import typer'``."""
    log = Path(__file__).parent.parent / "tests/data/captures/h200-vllm-0.26.0/08-runtime-oom.log"

    def best(*arguments: str) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - begin)
        return min(times)

    typer = best("-c", "import typer")
    ours = best("-m", "supervisord_vllm.cli.main", "diagnose", str(log))
    print(f"diagnose on a short file: {ours:.3f} s, import typer {typer:.3f} s, over it {ours - typer:.3f} s")


if __name__ == "__main__":
    main()
