"""What a report says in sentences: the plan's worth, its memory, what binds it. Pure text, no HTML."""

from __future__ import annotations

from collections.abc import Iterator

from hzplan.show.readable import duration, size
from hzplan.show.report import Occupancy, Report

NAMED_SHARE = 0.01
"""Share of the critical path, or of the peak, below which a part of it is not worth words."""


def worth(report: Report) -> str:
    """One sentence: the step, measured or predicted, beside the fastest known scheme that fits."""
    step, over = duration(report.step_s), report.occupancy
    said = f"{step} a step"
    if report.beside:
        measured = duration(report.beside[0].measured)
        said = f"{measured} a step, measured over {_steps(report.measured_steps)}; predicted were {step}"
    said += _compared(report)
    if over.peak_bytes > over.budget_bytes:
        more = size(over.peak_bytes - over.budget_bytes)
        said += f"; its peak is {more} above the budget of {size(over.budget_bytes)}"
    return f"{said}."


def _compared(report: Report) -> str:
    """The prediction beside the known schemes, after a comma; empty where there are none."""
    worth, own = report.worth, report.step_s
    if worth is None:
        budget = size(report.occupancy.budget_bytes)
        return f", and no known scheme fits the budget of {budget}" if len(report.schemes) > 1 else ""
    barred = any(scheme.fits and not scheme.allowed for scheme in report.schemes)
    fastest = "the fastest known scheme that fits" + (" and is as asked" if barred else "")
    if worth.same:
        return f", and the plan is {worth.over} at its best, {fastest}"
    beside = f"{worth.over} at its best ({duration(worth.step_s)}), {fastest}"
    if abs(worth.step_s - own) <= worth.tie * own:
        return f", as fast as {beside}"
    change = 1 - own / worth.step_s if worth.step_s else 0.0
    return f", {abs(change):.1%} {'less' if change > 0 else 'more'} than {beside}"


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number != 1)}"


def memory(over: Occupancy) -> Iterator[str]:
    """What of the budget is free at the peak, and the loss where it makes the peak."""
    free = over.budget_bytes - over.peak_bytes
    of = f"{size(over.peak_bytes)} of a budget of {size(over.budget_bytes)} at the peak"
    if free < 0:
        yield f"{of}: {size(-free)} too much."
    else:
        yield f"{of}: {size(free)} ({free / over.budget_bytes:.1%}) is free."
    spike = over.spike
    if spike is None or spike.nbytes < NAMED_SHARE * over.peak_bytes:
        return
    said = (
        f"The loss makes the peak: logits and their gradients at {spike.unit or 'the root'} take "
        f"{size(spike.nbytes)} above the most at any other unit"
    )
    if spike.in_chunks:
        said += f"; computed in chunks of tokens the peak would be {size(spike.in_chunks)} less"
    yield f"{said}."


def binds(report: Report) -> Iterator[str]:
    """What the step's length comes from: a resource, then memory where other choices need more of it."""
    if report.binding is not None:
        yield (
            f"{_capital(report.binding.what)} binds: {duration(report.binding.seconds)}, longer than the "
            f"critical path of {duration(report.path_s)}."
        )
    elif report.bounds and report.path_s:
        first, *others = report.bounds
        said = (
            f"{_capital(first.resource)} binds: {first.seconds / report.path_s:.1%} of the critical path, "
            f"{duration(first.seconds)} of {duration(report.path_s)}"
        )
        named = [bound for bound in others if bound.seconds >= NAMED_SHARE * report.path_s]
        then = ", ".join(f"{bound.resource} {bound.seconds / report.path_s:.1%}" for bound in named)
        yield f"{said}; then {then}." if then else f"{said}."
    yield from _short_memory(report)


def _short_memory(report: Report) -> Iterator[str]:
    if report.path_s and report.recomputed_s >= NAMED_SHARE * report.path_s:
        why = "as the question asks" if report.recompute_asked else "because memory is short"
        share = report.recomputed_s / report.path_s
        yield f"{share:.1%} of the critical path is activations computed again, {why}."
    own, tie = report.step_s, report.worth.tie if report.worth else 0.0
    faster = [one for one in report.schemes[1:] if not one.fits and one.step_s < own * (1 - tie)]
    if faster:
        least = min(faster, key=lambda one: one.peak_bytes)
        more = size(least.peak_bytes - report.occupancy.budget_bytes)
        of = f", the leanest of {len(faster)} known schemes that do not fit and would be faster," * (
            len(faster) > 1
        )
        yield (
            f"With more memory {least.name}{of} would take {1 - least.step_s / own:.1%} less: it needs at "
            f"least {size(least.peak_bytes)}, {more} more than the budget."
        )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
