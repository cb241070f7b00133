"""Hypothesis profiles: `ci` (default) tries the same examples every time, HYPOTHESIS_PROFILE=explore tries new ones."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# A shell's background job begins with SIGINT ignored, and so would every process that a test starts: a handler of ours
# is taken away at exec, and they begin as under a terminal or systemd.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a shared machine with two cores is slow at times, and slowness is benchmarks' business.
settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, database=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
