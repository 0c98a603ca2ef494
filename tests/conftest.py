"""How tests run.

Hypothesis takes the same examples every time; ``--hypothesis-profile=explore`` looks for new ones. What tests
start can be interrupted even where they cannot: jobs in a shell's background ignore SIGINT, and so would
everything that they start.
"""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=_SLOW)
settings.load_profile("steady")
