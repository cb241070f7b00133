"""A neighbour: a real process that holds memory of a simulated card until it is ended or its time is over.

``python -m supervisord_vllm.simulation.neighbour --card STATE --bytes 40GiB [--after-file F] [--when launch=N]
[--when stage=NAME] [--for 20s] [--name python]``. It waits for all conditions (each stays true once it was: the launch
is reached or passed, the stage was seen in such a launch), takes the memory, prints one line, and ends with 0 on
SIGTERM, SIGINT, when its time is over or when the card's file is taken away; with 1 if the memory does not fit.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from supervisord_vllm.simulation.card import CardError
from supervisord_vllm.simulation.fault import STAGES
from supervisord_vllm.simulation.quantity import read_duration, read_size
from supervisord_vllm.simulation.shared_card import CardFullError, SharedCard

POLL = 0.02
"""Seconds between two looks at a condition."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="neighbour", description="Hold memory of a simulated card.")
    parser.add_argument("--card", required=True, metavar="STATE", help="the card's state file")
    parser.add_argument("--bytes", required=True, type=_reader(read_size, "a size such as 40GiB"), dest="size")
    parser.add_argument("--after-file", metavar="F", help="take the memory only once this file exists")
    parser.add_argument("--when", action="append", default=[], type=_condition, metavar="launch=N or stage=NAME")
    parser.add_argument("--for", type=_reader(read_duration, "a duration such as 20s"), dest="seconds")
    parser.add_argument("--name", default="python", help="the command that is shown for it")
    options = parser.parse_args(arguments)

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    card = SharedCard(options.card)
    try:
        _wait(card, dict(options.when), options.after_file)
        card.hold(options.size, options.name)
    except (CardError, CardFullError) as error:
        print(f"neighbour: {error}", file=sys.stderr)
        return 1
    print(f"neighbour: pid {os.getpid()} holds {options.size} bytes of {options.card}", flush=True)
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    while card.exists and (deadline is None or time.monotonic() < deadline):
        time.sleep(POLL if deadline is not None else 5 * POLL)
    if card.exists:
        card.release()
    return 0


def _wait(card: SharedCard, wanted: dict[str, str], after_file: str | None) -> None:
    while True:
        if after_file is None or Path(after_file).exists():
            launch, stage = card.progress() if card.exists else (0, "")
            reached = STAGES.index(stage) if stage in STAGES else -1
            due = int(wanted.get("launch", 0))
            if launch >= due and ("stage" not in wanted or reached >= STAGES.index(wanted["stage"])):
                return
        time.sleep(POLL)


def _condition(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if key == "launch" and value.isdecimal():
        return key, value
    if key == "stage" and value in STAGES:
        return key, value
    raise argparse.ArgumentTypeError(f"{text!r}: launch=N or stage=NAME is wanted; stages are {', '.join(STAGES)}")


def _reader(read: Callable[[str], int | float | None], wanted: str) -> Callable[[str], int | float]:
    def convert(text: str) -> int | float:
        value = read(text)
        if value is None:
            raise argparse.ArgumentTypeError(f"{text!r}: {wanted} is wanted")
        return value

    return convert


if __name__ == "__main__":
    sys.exit(main())
