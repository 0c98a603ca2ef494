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
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anyone imports torch. A process with threads of OpenMP cannot fork one that uses them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=_SLOW)
settings.load_profile("steady")


class Scheduling(LoadScopeScheduling):
    """Which tests one process of pytest takes together: those of a file that has a fixture for the module."""

    @staticmethod
    @cache
    def _together(path: str) -> bool:
        return 'scope="module"' in (Path(__file__).parents[1] / path).read_text(encoding="utf-8")

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if self._together(path) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """For ``--numprocesses``: no file keeps one process busy while the others have nothing to do."""
    return Scheduling(config, log)
