"""``python -m tests.accelerator --interleavings 100000``: of all plans together, on all processors."""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import time

import torch

from tests.accelerator.cases import CASES, recorded
from tests.accelerator.interleavings import Found, Machine
from tests.accelerator.races import races


def tried(number: int, seeds: range) -> tuple[int, int, str]:
    """A case's operations and races, and what its interleavings have shown."""
    torch.set_num_threads(1)
    programs = recorded(CASES[number])
    machine = Machine(programs)
    try:
        for seed in seeds:
            machine.run(seed)
    except Found as found:
        return machine.operations, sum(len(races(p)) for p in programs), str(found)
    return machine.operations, sum(len(races(p)) for p in programs), ""


def main() -> None:
    """Print a line for each plan; exit code 1 where one has shown something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interleavings", type=int, default=2_000)
    wanted = parser.parse_args().interleavings
    each = -(-wanted // len(CASES))
    began, bad = time.monotonic(), 0
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(tried, number, range(each)) for number in range(len(CASES))]
        for case, job in zip(CASES, jobs, strict=True):
            operations, raced, shown = job.result()
            bad += bool(raced or shown)
            print(
                f"{case.name:45} {operations:6} operations, {raced} races, {each} interleavings "
                f"{shown or 'alike'} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
