"""From the core's wish to start an engine to everything that its launch needs."""

from __future__ import annotations

import os

from supervisord_vllm.config import Settings
from supervisord_vllm.config.arguments import value
from supervisord_vllm.core.actions import Adopt, Spawn
from supervisord_vllm.core.levers import MODEL_LEN
from supervisord_vllm.core.progress import Gaps
from supervisord_vllm.engine.command import command_line, engine_environment
from supervisord_vllm.host.leftovers import caches
from supervisord_vllm.host.tree import Patience
from supervisord_vllm.launch import Order
from supervisord_vllm.redaction import Redactor
from supervisord_vllm.store.launch_logs import launch_log
from supervisord_vllm.vigil import Terms


def order_of(settings: Settings, redactor: Redactor, marker: str, action: Spawn | Adopt, gaps: Gaps) -> Order:
    """What one launch is started with; ``gaps`` is what the launches before it taught of healthy silence."""
    engine = settings.engine
    argv = command_line(engine, action.levers)
    drain = value(engine.args, "--shutdown-timeout")
    grace = settings.stop.grace.seconds
    if drain is not None and drain.isdigit():
        grace = max(grace, int(drain) + 10)
    patience = settings.hang.patience
    return Order(
        number=action.launch,
        argv=argv,
        env={**engine_environment(engine, os.environ, marker), **dict(action.environment)},
        shown=redactor.argv(argv),
        marker=marker,
        log=launch_log(settings.state_dir / "launches", action.launch),
        log_bytes=settings.log.keep_launch_bytes,
        cwd=engine.working_dir,
        grace_s=grace,
        served=settings.proof.canary,
        health_every_s=settings.poll.health.seconds,
        metrics_every_s=settings.poll.metrics.seconds,
        terms=Terms(
            launch=action.launch,
            served=settings.proof.canary,
            start_ns=settings.start.patience.ns,
            hang_ns=None if patience is None else patience.ns,
            max_model_len=action.levers.number(MODEL_LEN),
            gaps=gaps,
            caches=tuple(caches({**os.environ, **engine.env})),
            headless="--headless" in engine.args,
        ),
        patience=Patience(
            interrupt=settings.stop.interrupt.seconds,
            terminate=settings.stop.terminate.seconds,
            deadline=settings.stop.kill.seconds,
        ),
    )
