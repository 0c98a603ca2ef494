"""``python -m benchmarks.published``: fit to published rows, hold predictions against them, write it down.

``--rows FILE`` predicts other rows of the same form with the figures as shipped, and fits nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.published.fitting import Fit, Training, fit_micro
from benchmarks.published.freedoms import instead
from benchmarks.published.micro import measured
from benchmarks.published.parameters import Values
from benchmarks.published.predict import Traces
from benchmarks.published.report import Result, document, plot, summary
from benchmarks.published.scored import Coverage, Question, Scored, questions, scorable, score
from benchmarks.published.settings import apart, counted
from benchmarks.published.write import expected_errors, fitted_count, write_models
from hzplan.errors import UserError
from hzplan.formats.published import MicroRow, Rows, TrainingRow, read_rows, shipped_rows

MOST_FIGURES, MOST_NETWORK_FIGURES = 14, 8
"""Upper limits of fitted figures of a device and of a network."""


def main() -> int:
    """Run the command; 0, or 1 where a device or network has too many fitted figures."""
    asked = _arguments()
    began = time.monotonic()
    traces = Traces(asked.traces)
    rows = read_rows(asked.rows or shipped_rows() / "rows.jsonl", TrainingRow)
    micro = read_rows(shipped_rows() / "micro.jsonl", MicroRow)
    for line in (*rows.problems, *micro.problems):
        print(line, file=sys.stderr)
    coverage = scorable(questions(rows.rows, marked=rows.marked), traces)
    if not coverage.questions:
        for row, why in coverage.left_out:
            print(f"{row.id}: {why}", file=sys.stderr)
        raise UserError(f"{asked.rows or 'the rows'}: no row can be predicted")
    shipped = score(coverage.questions, traces, {})
    if asked.rows:
        apart_scored, apart_out = _apart(rows, traces, {})
        result = Result(coverage, shipped, (), (), (), None, rows.problems, apart_scored, apart_out)
        print(summary(result))
        for row, why in (*coverage.left_out, *apart_out):
            print(f"{row.id}: {why}")
        other = sum(not counted(row) and not apart(row) for row in rows.rows)
        print(f"{other} rows of experts, or not in 16 bits, are read and not predicted")
        if asked.each:
            _each(shipped)
        return 0
    training = Training(
        coverage.questions, measured(micro.rows), fit_micro(measured(micro.rows)), traces, _say
    )
    found = training.whole()
    scored = score(coverage.questions, traces, found.values)
    result = Result(
        *(coverage, scored, shipped),
        _left_out(training, coverage, "source"),
        _left_out(training, coverage, "device"),
        found,
        (*rows.problems, *micro.problems),
        *_apart(rows, traces, found.values),
        [row for row in rows.rows if not counted(row) and not apart(row)],
    )
    print(summary(result))
    too_many = _too_many(found)
    if asked.write:
        _write(result, found, traces, asked.write)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if too_many else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--rows", type=Path, help="other rows, to be predicted as shipped; nothing is fitted")
    parser.add_argument("--each", action="store_true", help="with --rows: a line for each row")
    parser.add_argument("--traces", type=Path, help="a folder in which traced models are kept between runs")
    parser.add_argument(
        "--write", type=Path, metavar="ROOT", help="write cost_models/ and docs/ under this folder"
    )
    return parser.parse_args()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _left_out(training: Training, coverage: Coverage, what: str) -> list[Scored]:
    """Every row, as predicted by a fit without its source, or without its device's rows."""
    found: list[Scored] = []

    def key(one: Question) -> str:
        return one.row.family if what == "source" else one.chip

    for name in sorted({key(one) for one in coverage.questions}):
        _say(f"without {what} {name}")
        found += training.without({one.row.id for one in coverage.questions if key(one) == name})[1]
    return found


def _apart(
    rows: Rows[TrainingRow], traces: Traces, values: Values
) -> tuple[list[Scored], list[tuple[TrainingRow, str]]]:
    """Rows that are predicted, but are neither fitted to nor among those that the model is held to; and rows
    of their kind that cannot be predicted, with the reason."""
    found: list[Scored] = []
    coverage = scorable(questions(rows.rows, apart, rows.marked), traces)
    left_out = [*coverage.left_out]
    for one in coverage.questions:
        try:
            found += score([one], traces, values)
        except UserError as error:  # degrees that do not divide the mesh
            left_out.append((one.row, str(error)))
    return found, left_out


def _too_many(found: Fit) -> bool:
    counts = fitted_count(found)
    links = {owner for owner in counts if f"{owner}.latency_s" in {**found.micro.values}}
    for owner, count in sorted(counts.items()):
        most = MOST_NETWORK_FIGURES if owner in links else MOST_FIGURES
        print(f"{owner}: {count} fitted figures, at most {most}")
        if count > most:
            return True
    return False


def _write(result: Result, found: Fit, traces: Traces, root: Path) -> None:
    models = root / "cost_models"
    write_models(found, models)
    errors = expected_errors(result.scored, result.without_source, result.without_device, result.alike)
    errors.save(models / "expected.json")
    plot(result.scored, root / "docs" / "published.svg")
    command = "python -m benchmarks.published --write ."
    text = document(
        result, "published.svg", command, instead(result.coverage.questions, traces, found.values)
    )
    (root / "docs" / "published.md").write_text(text, encoding="utf-8")


def _each(scored: list[Scored]) -> None:
    for one in scored:
        row, said = one.question.row, one.prediction
        print(
            f"{row.id}: predicted {said.tokens_per_s:.0f} ({said.low:.0f} to {said.high:.0f}), published "
            f"{one.question.published:.0f} tokens/s, {said.tokens_per_s / one.question.published:.3f}"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"benchmarks.published: {error}", file=sys.stderr)
        sys.exit(UserError.exit_code)
