"""``python -m supervisord_vllm.simulation``: ``serve MODEL [vLLM's flags]`` is the stand-in engine, ``neighbour`` holds
memory of a card, ``card STATE [--toml T]`` makes a card's state file and shows it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_USAGE = "usage: python -m supervisord_vllm.simulation {serve MODEL [flags] | neighbour ... | card STATE [--toml T]}"


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands; ``serve`` does not return."""
    verb = arguments[0] if arguments else ""
    if verb == "neighbour":
        from supervisord_vllm.simulation import neighbour

        return neighbour.main(arguments[1:])
    if verb == "card" and len(arguments) in (2, 4) and (len(arguments) == 2 or arguments[2] == "--toml"):
        return _card(*arguments[1:2], *arguments[3:4])
    if verb in ("neighbour", "card") or (verb and not verb.startswith("-") and verb != "serve"):
        print(_USAGE, file=sys.stderr)
        return 2
    from supervisord_vllm.simulation.api_server import serve

    return serve(arguments)


def _card(state: str, toml: str | None = None) -> int:
    from supervisord_vllm.simulation.card import CardError
    from supervisord_vllm.simulation.memory import read_memory
    from supervisord_vllm.simulation.quantity import gib
    from supervisord_vllm.simulation.shared_card import CARD_VARIABLE, TOML_VARIABLE, SharedCard

    try:
        SharedCard.from_environment({CARD_VARIABLE: state, **({TOML_VARIABLE: toml} if toml else {})})
        memory = read_memory(state)
    except CardError as error:
        print(f"card: {error}", file=sys.stderr)
        return 2
    print(f"{memory.name} {memory.uuid}: {gib(memory.free)} of {gib(memory.usable)} GiB free")
    for holder in memory.holders:
        print(f"  pid {holder.pid} ({holder.command}, {holder.user}): {gib(holder.bytes)} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
