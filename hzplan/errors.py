"""Exceptions for users, each with the exit code of the command line."""

from __future__ import annotations

from typing import ClassVar


def printable(value: object) -> str:
    """Text from outside on one line; control characters, and all that XML or UTF-8 refuses, become ``?``."""
    return "".join(character if character.isprintable() else "?" for character in str(value))


class UserError(Exception):
    """Bad usage or input: one line that names the file, field or rank, and says what to do.

    The message may quote text from elsewhere (another exception's, a file's); line breaks and runs of
    blanks become one space, so that it stays one line, and what cannot be printed a question mark.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.split())))


class CheckFailed(UserError):
    """A check ran and its answer is no."""

    exit_code = 1


class NoPlanFits(UserError):
    """No plan meets the constraints."""

    exit_code = 3


class JobFailed(UserError):
    """A rank of the distributed job died or timed out."""

    exit_code = 4


class Preempted(UserError):
    """The run was asked to end before its time, and has saved."""

    exit_code = 5


class StreamError(JobFailed):
    """A task on a communication or optimizer stream of this rank failed; ``__cause__`` is its exception.

    ``lost_peer``: whether another rank's death is the likely reason, so that its message is the one to show.
    """

    def __init__(self, message: str, *, lost_peer: bool = False) -> None:
        super().__init__(message)
        self.lost_peer = lost_peer


class OutOfMemory(JobFailed):
    """This rank's memory is not enough."""


def one_line(error: BaseException, limit: int = 200) -> str:
    """``Type: message`` of any exception in one line of about ``limit`` characters, to quote it."""
    text = " ".join(str(error).split())
    if len(text) > limit:
        text = text[:limit].rstrip() + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def last_cause(error: BaseException) -> BaseException:
    """The exception at the bottom of a chain of ``raise … from``."""
    seen = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator had no more to give, on a device or the host."""
    cause = last_cause(error)
    return isinstance(cause, MemoryError) or any(
        word in str(cause) for word in ("out of memory", "can't allocate memory", "not enough memory")
    )


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception looks like another rank's death, and so is not the cause of the job's."""
    text = str(error)
    return isinstance(error, ConnectionError) or any(
        word in text for word in ("gloo", "Connection", "closure")
    )
