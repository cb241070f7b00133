"""How many engines of this size a load needs: an estimate from the pages of five minutes, with its derivation.

*A queue that grows* is a question of rates. Requests come at a rate of a and are finished at a rate of s by one engine
that is never idle, so n = a / s engines keep up. Requests that came are counted by conservation: each of them is
finished, runs or waits.

*A queue that stands* (clients that wait for their answer before they ask again: then a = s, whatever n is) is a
question of places. By Little's law a request waits W = Q / a behind a mean queue of Q. Those who wait no longer than
the target T are a * T; the others would have to run beside the R that run: n = (R + (Q - a * T)+) / R. Without a target
that a queue can miss, T = 0.

*No queue, but tokens come too slowly*: a step takes the longer, the more sequences it serves, at most in proportion, so
that n is at most the measured 95th percentile over the target.

It says how large the lack is, not what to buy: rates and places scale with the number of engines only as far as the
load can be spread over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from supervisord_vllm.core.policy import SECOND, Pressure
from supervisord_vllm.core.pressure import Sample, quantile

GROWS = 0.05
"""A queue grows if this share more comes than is finished."""


def engines_needed(targets: Pressure, window: Sequence[Sample]) -> float | None:
    """Engines of this size that would serve the load of a window within the targets; ``None``: it cannot be told."""
    if len(window) < 2:
        return None
    first, last = window[0], window[-1]
    seconds = (last.at_ns - first.at_ns) / SECOND
    finished, arrived = last.finished - first.finished, last.arrived - first.arrived
    if seconds <= 0 or finished <= 0:
        return None
    if last.waiting > first.waiting and arrived > (1 + GROWS) * finished:
        return arrived / finished
    running, waiting = fmean(page.running for page in window), fmean(page.waiting for page in window)
    borne = [target for target in (targets.ttft_ns, targets.queue_ns) if target is not None]
    excess = max(0.0, waiting - arrived / seconds * min(borne, default=0) / SECOND)
    places = (running + excess) / running if running > 0 else 1.0
    between = quantile(first.inter_token, last.inter_token, 0.95)
    slow = between / (targets.inter_token_ns / SECOND) if between and targets.inter_token_ns else 1.0
    return max(1.0, places, slow)
