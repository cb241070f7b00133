"""What the surfaces ask of the daemon."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from supervisord_vllm.status import Document, Snapshot

Verb = Literal["start", "stop", "hold", "resume", "restart", "drain", "reset", "step", "upgrade"]
VERBS: tuple[str, ...] = get_args(Verb)


class RefusedError(Exception):
    """The daemon will not do it; the message says why, in one line."""


class Control(Protocol):
    """The daemon, as its surfaces see it. Called on the daemon's loop."""

    def snapshot(self) -> Snapshot:
        """Describe this moment; cheap, never waits."""
        ...

    def series(self) -> Document:
        """The load of the last fifteen minutes (see `supervisord_vllm.series`); cheap, never waits."""
        ...

    async def command(
        self,
        verb: Verb,
        reason: str,
        by: str,
        lever: str = "",
        direction: Literal["up", "down"] = "down",
        for_ns: int | None = None,
    ) -> str:
        """Carry out an operator's verb; the answer is one line for them. Lever and direction belong to ``step``,
        ``for_ns`` (how long; ``None``: until ``resume``) to ``hold``.

        Raises:
            RefusedError: it is not done.
        """
        ...
