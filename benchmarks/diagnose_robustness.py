"""A million random and mutated lines: no exception, bounded memory, no configuration change from a serving engine's
noise.

    python benchmarks/diagnose_robustness.py [LINES] [SEED]      (default 1,000,000 lines, seed 0)

Lines are real ones (captures, corpus, held-out), cut, joined, flipped and mixed with bytes; every signature's example
among them, as the server would quote it. Three uses are driven: a file with several launches, the daemon's classifier
while it serves, and one fed with nothing but bytes. The quick tests run a shorter form of this.
"""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from supervisord_vllm.engine.circumstance import Outside
from supervisord_vllm.engine.classifier import Classifier
from supervisord_vllm.engine.launches import Launches
from supervisord_vllm.engine.signature import catalogue

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
EVERY = 50_000
QUOTES = (
    b"(APIServer pid=91701) INFO 12-01 01:00:00 [logger.py:41] Received request cmpl-1: prompt: %r",
    b"(APIServer pid=91701) ERROR 12-01 01:00:00 [serving.py:9] %s",
    b"(APIServer pid=91701) %s",
    b"INFO:     127.0.0.1:9 - %s",
    b"%s",
)


def pool() -> list[bytes]:
    """Lines of every log that there is."""
    lines = [line for path in sorted(DATA.rglob("*.log")) for line in path.read_bytes().split(b"\n")]
    return lines + [s.example.encode() for s in catalogue().signatures]


def mutated(lines: list[bytes], chance: random.Random) -> bytes:
    """One line, most likely broken."""
    line = chance.choice(lines)
    how = chance.randrange(8)
    if how == 0:
        return chance.randbytes(chance.randrange(300))
    if how == 1:
        at = chance.randrange(len(line) + 1)
        return line[at:] + line[:at]
    if how == 2:
        return line + b"\r" + chance.choice(lines)
    if how == 3:
        return line[: chance.randrange(len(line) + 1)] + chance.choice(lines)
    if how == 4:
        flipped = bytearray(line)
        for _ in range(min(3, len(flipped))):
            flipped[chance.randrange(len(flipped))] = chance.randrange(256)
        return bytes(flipped)
    if how == 5:
        return line * chance.randrange(1, 40)
    return line


def quoted(lines: list[bytes], chance: random.Random) -> bytes:
    """A line as a client could bring it into a serving engine's log."""
    return chance.choice(QUOTES).replace(b"%r", b"%s") % chance.choice(lines)


def run(count: int, seed: int) -> Iterator[str]:
    """Drive all three; yields what is worth printing, raises on the first fault."""
    chance, lines = random.Random(seed), pool()  # noqa: S311 - repeatable noise
    launches, alive, noise = Launches(), serving(), Classifier()
    for number in range(1, count + 1):
        launches.feed(mutated(lines, chance))
        alive.feed(quoted(lines, chance))
        noise.feed(chance.randbytes(chance.randrange(200)))
        if number % (EVERY // 50) == 0:
            found = alive.verdict(outside=Outside())
            assert not found.change, found
            launches.verdict()
            noise.verdict(exit_code=chance.choice((None, 0, 1, 2, 137)))
        if number % EVERY == 0:
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            yield f"{number:>9,} lines, peak {grown:.0f} MiB, {len(launches.earlier)} launches, {found.kind.value}"
            alive = serving()


def serving() -> Classifier:
    """A classifier of a tagged engine that serves. A client can bring tags of its own, but does not know the numbers of
    the processes: with them, text cannot tell a forgery from a death, only the daemon can, which waits for an exit.
    """
    classifier = Classifier()
    for line in (
        b"(APIServer pid=91701) INFO 12-01 01:00:00 [api_utils.py:345] vLLM server version 0.32.0, serving model m",
        b"(EngineCore pid=91702) INFO 12-01 01:00:00 [core.py:9] Initializing a V1 LLM engine (v0.32.0) with config: x",
        b"(APIServer pid=91701) INFO:     Application startup complete.",
    ):
        classifier.feed(line)
    return classifier


def main() -> None:
    """Run as long as asked for."""
    numbers = [int(word) for word in sys.argv[1:]]
    for text in run(numbers[0] if numbers else 1_000_000, numbers[1] if len(numbers) > 1 else 0):
        print(text, flush=True)


if __name__ == "__main__":
    main()
