"""The results as docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.measure import SMALLEST
from benchmarks.plans import VARIANTS
from benchmarks.regimes import COUNT, DRAWN, Regime, bits_per_s
from benchmarks.verdict import BARS, MEDIANS, SHARE, Verdict, fits, judge, ratio_of
from hzplan.peers import LOCAL, OURS, POORER

FACTORS = {
    "single": "one triple for the model → a level per tensor",
    "roles": "one triple per role (greedy) → a level per tensor",
    "prefetch-1": "prefetch 1 → chosen",
    "one-stream": "one background stream → a stream per tier",
    "no-threads": "no threads → threads",
}


LEAST_SHOWN_S = 5e-4
"""Processor time that is worth a figure."""


def markdown(results: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = (_head, _main, _ablations, _waits, _processors, _peers)
    return "\n".join([*(line for part in parts for line in part(results)), ""])


def _head(results: Mapping[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    commits = ", ".join(sorted({regime["commit"] for regime in results["regimes"]}))
    yield "# Benchmarks"
    yield ""
    yield (
        f"Measured {results['date']} at commit {commits} on {machine['cpus']} cores of "
        f"{machine['cpu']}, torch {machine['torch']}, with `{results['command']}`."
    )
    measured = len(results["regimes"])
    if measured < COUNT + DRAWN:
        yield ""
        yield f"**{measured} of {COUNT + DRAWN} regimes are measured so far**; the others say nothing yet."
    yield ""
    yield (
        "Every regime is a cluster in a box (`hzplan emulate`): network namespaces, with shaped links, "
        "all ranks on this one machine. Absolute times mean little elsewhere; ratios are paired by round in "
        "one job, with the exact 95% interval of Wilcoxon's signed-rank test. The regimes in "
        "`benchmarks/regimes.json` were written down before the first of them was measured, and so were "
        "those in `benchmarks/regimes_drawn.json`, which chance has drawn."
    )
    yield ""


def _main(results: Mapping[str, Any]) -> Iterator[str]:
    judged = list(_judged(results))
    yield "## The plan and the best peer that fits"
    yield ""
    yield (
        "*ratio*: the best fitting peer's step over the plan's; *A/A*: half-width of DDP against itself. "
        "Peers that fit and come near the fastest in a first job are in three settings each: *@* and the "
        "number of buckets (DDP, ZeRO-1 and tensor parallelism: 6, 3 or 1), or of the blocks that FSDP2 "
        "gathers ahead (1, 2, or 0: as torch does by itself). Lost where the interval lies wholly below the "
        "bar: "
        + ", ".join(f"{name} {bar}" for name, bar in BARS.items())
        + f". *share*: (peer − plan) ÷ (peer − bound), asked to be {SHARE} where the network binds; "
        "bound: the larger of a step without communication and the bytes that must cross at the link's rate. "
        "*predicted*: the plan's predicted step over the measured one."
    )
    yield ""
    yield "| regime | class | plan | best peer | ratio (95%) | A/A | bar | share | predicted |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for regime, result, verdict in judged:
        yield _row(regime, result, verdict)
    yield ""
    for result in results["regimes"]:
        if result.get("infeasible"):
            yield f"- {Regime(**result['regime']).name}: no plan fits"
    for regime, result, _ in judged:
        if "no_plan_in_bytes" in result:
            yield _smallest(regime, result)
    for failed in results["failed"]:
        yield f"- not measured: {failed['regime']}: {failed['why']}"
    yield from _totals([verdict for _, _, verdict in judged])


def _smallest(regime: Regime, result: Mapping[str, Any]) -> str:
    """What everyone needs where no plan fits."""
    found: dict[str, list[float]] = {}
    for entry in (*result.get("look", ()), *result["comparison"]["contenders"]):
        name = entry["name"].partition("@")[0]
        if name in (OURS, *SMALLEST):
            found.setdefault(name, []).append(entry["peak_memory_bytes"] / 1e6)
    needs = ", ".join(
        f"{name} {min(mb):.1f}" + (f" to {max(mb):.1f}" if max(mb) > 1.01 * min(mb) else "")
        for name, mb in found.items()
    )
    return (
        f"- {regime.name}: no plan fits {result['no_plan_in_bytes'] / 1e6:.1f} MB, and the smallest "
        f"is measured. MB needed: {needs}. What fsdp2-offload copies to a device before it gathers takes "
        "neither time nor memory here, where the host is the device; plans had no host's memory."
    )


def _row(regime: Regime, result: Mapping[str, Any], verdict: Verdict) -> str:
    ours = _entry(result, OURS)["step_s"]["median"]
    peer = "none fits" if verdict.peer is None else verdict.peer
    theirs = "" if verdict.peer is None else f" {_entry(result, verdict.peer)['step_s']['median']:.3f} s"
    ratio = "" if verdict.peer is None else f"{verdict.ratio:.2f} ({verdict.low:.2f}–{verdict.high:.2f})"
    share = "–" if verdict.share is None else f"{verdict.share:.2f} {_mark(verdict.share_passed)}"
    return (
        f"| {regime.name} | {verdict.group} | {ours:.3f} s | {peer}{theirs} | {ratio} "
        f"| ±{verdict.margin:.2f} | {verdict.bar} {_mark(verdict.passed)} | {share} "
        f"| {result['predicted']['step_s'] / ours:.2f} |"
    )


def _totals(verdicts: Sequence[Verdict]) -> Iterator[str]:
    for group in BARS:
        found = [v for v in verdicts if v.group == group and v.peer]
        if found:
            ratios = [v.ratio for v in found]
            yield (
                f"- {group}: {sum(not v.passed for v in found)} of {len(found)} lost, ratio "
                f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
                + (f" (asked: {MEDIANS[group]})" if group in MEDIANS else "")
            )
    shares = [v for v in verdicts if v.share is not None]
    if shares:
        reached = sum(v.share_passed for v in shares)
        yield f"- share of the way to the bound: {reached} of {len(shares)} reach {SHARE}"
    yield ""


def _ablations(results: Mapping[str, Any]) -> Iterator[str]:
    measured = [(r, result) for r, result, _ in _judged(results) if result["ablations"]]
    if not measured:
        return
    yield "## What each freedom is worth"
    yield ""
    yield (
        "The poorer variant's step over the plan's, on the same runtime, in the same rounds (95% interval). "
        "*same*: the variant is the plan."
    )
    yield ""
    yield "| regime | " + " | ".join(FACTORS.values()) + " |"
    yield "|---" * (len(FACTORS) + 1) + "|"
    for regime, result in measured:
        cells = [_factor(result, name) for name in (*VARIANTS, *POORER)]
        yield f"| {regime.name} | " + " | ".join(cells) + " |"
    yield ""


def _factor(result: Mapping[str, Any], name: str) -> str:
    if name in result["same_as_plan"]:
        return "same"
    if name in result["infeasible_variants"]:
        return "none fits"
    ratio = ratio_of(_entry(result, name), _entry(result, OURS))
    return f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


def _waits(results: Mapping[str, Any]) -> Iterator[str]:
    """Which of the plan's streams kept compute waiting."""
    known = [(r, result) for r, result, _ in _judged(results) if "waits_s" in _entry(result, OURS)]
    if not known:
        return
    yield "## What the plan's compute waited for"
    yield ""
    yield (
        "Milliseconds of a step in which compute stood still, by stream: measured (predicted), from the same "
        "records as `hzplan run --trace`. *apart*: the largest difference, as a share of the step. *link*: "
        "the share of the step in which a node's link sends, from the kernel's count of bytes, under the "
        "plan and under the best fitting peer (of two tiers; three share links)."
    )
    yield ""
    yield "| regime | waits | apart | link |"
    yield "|---|---|---|---|"
    for regime, result in known:
        entry, predicted = _entry(result, OURS), result["predicted"]["exposed_comm_s"]
        waits, step_s = entry["waits_s"], entry["step_s"]["median"]
        names = dict.fromkeys([*predicted, *waits])
        cells = [
            f"{name} {1e3 * waits.get(name, 0.0):.0f} ({1e3 * predicted.get(name, 0.0):.0f})"
            for name in names
        ]
        apart = max(abs(waits.get(name, 0.0) - predicted.get(name, 0.0)) for name in names) / step_s
        verdict = judge(result)
        link = _busy(regime, entry)
        if link and verdict.peer is not None:
            link += f", {verdict.peer} {_busy(regime, _entry(result, verdict.peer))}"
        yield f"| {regime.name} | {', '.join(cells)} | {apart:.1%} | {link} |"
    yield ""


def _processors(results: Mapping[str, Any]) -> Iterator[str]:
    """Processor time beside wall."""
    known = [(r, x) for r, x, _ in _judged(results) if _entry(x, OURS).get("processor_s")]
    if not known:
        return
    yield "## Where processor time goes"
    yield ""
    yield (
        "Milliseconds of processor time of a rank in a step, by thread, from the kernel's account: the "
        "thread that computes, this runtime's streams (Python, sums and copies), and gloo's threads; under "
        "the plan, DDP, and ranks that train alone. *busy*: of the processors, while a step lasts."
    )
    yield ""
    yield "| regime | hzplan | ddp | alone |"
    yield "|---|---|---|---|"
    for regime, result in known:
        cells = [_spent(result, name, regime.world, results) for name in (OURS, "ddp", LOCAL)]
        yield f"| {regime.name} | " + " | ".join(cells) + " |"
    yield ""


def _spent(result: Mapping[str, Any], name: str, world: int, results: Mapping[str, Any]) -> str:
    if name not in _names(result):
        return "–"
    entry = _entry(result, name)
    spent, total = entry["processor_s"], sum(entry["processor_s"].values())
    parts = " + ".join(f"{1e3 * s:.0f} {what}" for what, s in spent.items() if s >= LEAST_SHOWN_S)
    busy = total * world / entry["step_s"]["median"] / results["machine"]["cpus"]
    return f"{1e3 * total:.0f}: {parts}; {busy:.0%} busy"


def _busy(regime: Regime, entry: Mapping[str, Any]) -> str:
    sent = list(entry["sent_bytes"].values())
    if regime.tiers.count("x") > 1 or not sent:
        return ""
    return f"{sent[-1] * 8 / bits_per_s(regime.network) / entry['step_s']['median']:.0%}"


def _peers(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Every contender"
    yield ""
    yield (
        "Median step, and its ratio to the plan's; *!* needs more memory than the budget, *≠* losses differ. "
        "*alone*: without communication."
    )
    yield ""
    names = list(dict.fromkeys(n for _, r, _ in _judged(results) for n in _names(r)))
    yield "| regime | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for regime, result, _ in _judged(results):
        yield f"| {regime.name} | " + " | ".join(_cell(result, name) for name in names) + " |"
    yield ""


def _names(result: Mapping[str, Any]) -> list[str]:
    return [e["name"] for e in result["comparison"]["contenders"] if e["name"] not in (*VARIANTS, *POORER)]


def _cell(result: Mapping[str, Any], name: str) -> str:
    if name not in _names(result):
        return "–"
    entry = _entry(result, name)
    marks = ("" if fits(entry, result) or name == LOCAL else " !") + ("" if entry["losses_agree"] else " ≠")
    ratio = "" if name == OURS else f" ({entry['ratio']['value']:.2f})"
    return f"{entry['step_s']['median']:.3f}{ratio}{marks}"


def _judged(results: Mapping[str, Any]) -> Iterator[tuple[Regime, Mapping[str, Any], Verdict]]:
    for result in results["regimes"]:
        if not result.get("infeasible"):  # of before the smallest plan was measured there
            yield Regime(**result["regime"]), result, judge(result)


def _entry(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(e for e in result["comparison"]["contenders"] if e["name"] == name)
    return found


def _mark(passed: bool | None) -> str:
    return "–" if passed is None else "✓" if passed else "✗"
