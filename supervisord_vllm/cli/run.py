"""``run``: the daemon in the foreground; what systemd starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from supervisord_vllm.cli.policyfile import ConfigOption, SetOption, refuse, settings_of


def run(
    config: ConfigOption,
    assignments: SetOption = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Begin afresh after a give-up: forget the spent budget.")
    ] = False,
) -> None:
    """Supervise the engine in the foreground.

    Ends with 0 after SIGTERM or SIGINT, 69 when nothing automatic is right any more, 78 for a bad policy.
    """
    settings = settings_of(config, assignments)
    from supervisord_vllm.foreground import run as supervise
    from supervisord_vllm.foreground import try_out
    from supervisord_vllm.handover import TRIAL

    if state_dir := os.environ.get(TRIAL):
        if (problem := try_out(settings, Path(state_dir))) is not None:
            refuse((problem,), as_json=False)
        return
    raise typer.Exit(supervise(settings, reset=reset))
