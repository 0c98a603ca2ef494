"""How tests run.

Hypothesis takes the same examples every time; ``--hypothesis-profile=explore`` looks for new ones. What tests
start can be interrupted even where they cannot: jobs in a shell's background ignore SIGINT, and so would
everything that they start. Of tests that start ranks no more than two run at once: a folder has one worker.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=_SLOW)
settings.load_profile("steady")

STARTS_RANKS = ("cli", "distributed")


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups, which ``--dist loadgroup`` keeps together."""
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0]
        if folder in STARTS_RANKS:
            item.add_marker(pytest.mark.xdist_group(folder))
