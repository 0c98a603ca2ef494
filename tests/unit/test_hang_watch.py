"""A stream that stays at one task for too long is found, with the task, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from hzplan.runtime.hang_watch import HangWatch


@dataclass
class Task:
    reached: bool = False

    def is_reached(self) -> bool:
        return self.reached


@dataclass
class Watched:
    """A watch with a clock of its own."""

    def __post_init__(self) -> None:
        self.now, self.hung = 0.0, list[tuple[str, float]]()
        self.watch = HangWatch(10.0, lambda *found: self.hung.append(found), lambda: self.now)

    def after(self, seconds: float) -> bool:
        self.now += seconds
        return self.watch.look()


def test_a_task_that_takes_too_long_is_named() -> None:
    watched = Watched()
    watched.watch.launched("reduce.1", "task reduce layers.2", Task())
    assert not watched.after(4.0)  # too young to be asked for
    assert not watched.after(1.0)  # seen for the first time
    assert not watched.after(5.0)
    assert watched.after(1.0)
    assert watched.hung == [("task reduce layers.2", 11.0)]


def test_what_is_known_to_be_done_is_not_asked_for() -> None:
    class Broken(Task):
        def is_reached(self) -> bool:
            raise AssertionError("a capture would break off")

    watched = Watched()
    tasks = [Broken() for _ in range(3)]
    for index, task in enumerate(tasks):
        watched.watch.launched("unshard.0", f"task {index}", task)
    watched.watch.forget({"unshard.0": tasks[-1], "compute": Task()})
    assert not watched.after(100.0)


def test_a_stream_that_gets_on_is_left_alone() -> None:
    watched = Watched()
    tasks = [Task() for _ in range(50)]
    for index, task in enumerate(tasks):
        watched.watch.launched("unshard.0", f"task {index}", task)
    for task in tasks:
        assert not watched.after(9.0)
        task.reached = True
    assert not watched.after(100.0) and not watched.after(100.0)


def test_of_several_streams_the_one_that_waits_longest_is_named() -> None:
    watched = Watched()
    watched.watch.launched("unshard.0", "the later one", first := Task())
    watched.watch.launched("reduce.0", "the cause", Task())
    watched.after(5.0)
    first.reached = True
    watched.watch.launched("unshard.0", "the later one", Task())
    watched.after(5.0)
    assert watched.after(20.0)
    assert [name for name, _ in watched.hung] == ["the cause"]


def test_the_process_ends_with_the_code_of_a_failed_job() -> None:
    script = (
        "from hzplan.runtime import hang_watch\n"
        "hang_watch.absent = lambda what: [3, 5]\n"
        "hang_watch.end_process('task x of step 7', 271.4, lambda ranks: ' (over network)')\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert said.returncode == 4
    assert said.stderr.strip() == (
        "hzplan: task x of step 7: under way for 271 s; ranks 3, 5 (over network) did not arrive"
    )
