"""Processor time by thread, and small sums that go straight from rank to rank."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from hzplan.peers import processors


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the kernel keeps no such account")
def test_processor_time_is_told_apart_by_what_threads_are_for() -> None:
    def work(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    before = processors.by_thread()
    ended = threading.Event()

    def beside(seconds: float) -> None:
        work(seconds)
        ended.wait(30)  # the account ends with the thread

    threads = [
        threading.Thread(target=beside, args=(seconds,), name=name)
        for name, seconds in (("hzplan reduce.1", 0.1), ("loader", 0.05))
    ]
    for thread in threads:
        thread.start()
    work(0.2)
    deadline = time.monotonic() + 30
    while (spent := processors.since(before)).get("streams", 0) < 0.1 or spent.get("other", 0) < 0.05:
        assert time.monotonic() < deadline, spent
        time.sleep(0.01)
    ended.set()
    for thread in threads:
        thread.join()
    assert spent["compute"] >= 0.2
    assert 0.1 <= spent["streams"] < 0.2


def test_threads_are_told_by_their_names() -> None:
    assert processors._purpose(-1, "pt_gloo_runloop") == processors.LIBRARY
    assert processors._purpose(-1, "NCCL watchdog") == processors.LIBRARY
    assert processors._purpose(-1, "hzplan gather.0") == processors.STREAMS
