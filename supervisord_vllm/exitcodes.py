"""Exit codes of the command line. Scripts and unit files rely on them; they never change their meaning."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process's status says.

    ``FAILURE_FOUND`` is given by ``diagnose --exit-code`` alone; ``GIVEN_UP`` makes systemd show the unit as failed.
    """

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    REFUSED = 3
    FAILURE_FOUND = 10
    GIVEN_UP = 69
    CONFIGURATION = 78
