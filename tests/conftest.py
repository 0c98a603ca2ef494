"""How tests run.

``make test`` leaves out what is marked ``long``; ``make test-all`` takes everything. Tests that share a
fixture of their module run in one process of pytest, the others wherever one is free. The processes that
tests start are forked from one that has imported torch (``tests.warm``).

Hypothesis takes the same examples every time; ``--hypothesis-profile=explore`` looks for new ones. What tests
start can be interrupted even where they cannot: jobs in a shell's background ignore SIGINT, and so would
everything that they start.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anyone imports torch. A process with threads of OpenMP cannot fork one that uses them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=_SLOW)
settings.load_profile("steady")


@pytest.hookimpl(tryfirst=True)  # before the hook of xdist that reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests by the module's fixture that they share, for --dist loadgroup, so that it is made once."""
    for item in items:
        module = item.nodeid.partition("::")[0]
        known = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
        shared = [name for name, (*_, found) in known.items() if found.scope == "module"]
        if shared:
            item.add_marker(pytest.mark.xdist_group(f"{module} {min(shared)}"))
