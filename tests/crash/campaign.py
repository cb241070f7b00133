"""All crash points of all stories, resumable: ``campaign.py --done FILE [--story S] [--at once N]``.

A case that passed is a line of the file. What failed is told at once, the rest goes on; the status is 1 then. The
points are recorded anew at each start, so a file of an older version only saves what is still the same.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __name__ == "__main__":
    sys.path[0:1] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from crash.stories import STORIES, Case, cases, survive


def main() -> int:
    """Cases that have not passed yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--done", type=Path, required=True, help="one passed case a line")
    parser.add_argument("--story", choices=STORIES, action="append")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--sample", type=int, help="this many, chosen by --seed, instead of all")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    passed = set(given.done.read_text().splitlines()) if given.done.exists() else set()
    every = [case for story in given.story or STORIES for case in cases(story)]
    chosen = every if given.sample is None else random.Random(given.seed).sample(every, given.sample)
    left = [case for case in chosen if str(case) not in passed]
    print(f"{len(every)} cases, {len(left)} to play", flush=True)
    failed: list[str] = []
    writing = threading.Lock()

    def play(case: Case) -> None:
        try:
            told = survive(case)
        except AssertionError as error:
            told = f"FAILED {error}"
            failed.append(str(case))
        else:
            with writing, given.done.open("a") as file:
                file.write(f"{case}\n")
                file.flush()
                os.fsync(file.fileno())
        print(told, flush=True)

    pool = ThreadPoolExecutor(given.at_once)
    try:
        list(pool.map(play, left))
    finally:  # broken off: what runs ends its daemon, what waits is for the next time
        pool.shutdown(cancel_futures=True)
    print(f"{len(left) - len(failed)} passed, {len(failed)} failed", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
