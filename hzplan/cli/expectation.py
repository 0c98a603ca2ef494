"""What step to expect of a modelled plan, from published runs: a range, and what no row covers."""

from __future__ import annotations

from hzplan.cli import console
from hzplan.formats.expected import Covered, Expected, ExpectedEntry, expected
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile


def known_for(profile: Profile) -> Expected | None:
    """Published errors of predictions like a profile's; None where there are none: seconds were measured, or
    modelled without the SMs that communication takes, as before the model was fitted."""
    modelled = profile.modelled
    if modelled is None or modelled.device is None or profile.cluster.backend != "nccl":
        return None
    return expected() if profile.interference else None


def range_s(profile: Profile, step_s: float) -> tuple[float, float] | None:
    """Seconds between which eight of ten published runs would be; None where no rows say."""
    known = known_for(profile)
    if known is None or profile.modelled is None or profile.modelled.device is None:
        return None
    entry = known.of(profile.modelled.device) or known
    return step_s * entry.low, step_s * entry.high


def described(profile: Profile, plan: Plan) -> str | None:
    """The range in words, with its rows; None where the seconds are not such a model's."""
    modelled = profile.modelled
    if modelled is None or modelled.device is None or profile.cluster.backend != "nccl":
        return None
    known, step = known_for(profile), plan.predicted.step_s
    found = range_s(profile, step)
    if known is None or found is None:
        return (
            "the profile leaves out the SMs that communication takes, so what is known of published runs "
            "does not hold for it: profile again"
        )
    said = f"{console.duration(step)}, expect {console.duration(found[0])} to {console.duration(found[1])}"
    entry = known.of(modelled.device)
    if entry is None:
        said += f": {_whose(known, modelled.device)}"
    else:
        said += f": of {_from(entry)}, eight of ten were {entry.low} to {entry.high} times as long"
    beyond = ", ".join(_beyond(entry or known.covered, profile, plan))
    return f"{said}; outside what rows cover: {beyond}" if beyond else said


def _whose(known: Expected, device: str) -> str:
    """Of which rows the range of a device without an entry is."""
    few = known.few.get(device)
    own = "no published row is" if few is None else f"only {few} published rows are"
    return (
        f"{own} of this chip, dense, in 16 bits and without model parallelism; of {known.rows} rows, each "
        f"predicted without the rows of its own chip, eight of ten were {known.low} to {known.high} times as "
        "long"
    )


def _from(entry: ExpectedEntry) -> str:
    """The rows of an entry, and whether the model had seen them."""
    other = "" if entry.own == entry.rows else f" ({entry.own or 'none'} of this device)"
    how = "to which the model was fitted" if entry.sources == 1 else "predicted without their source"
    return f"{entry.rows} published rows of this chip{other}, {how}"


def within_error(profile: Profile, share: float) -> str | None:
    """A line where a plan's lead is smaller than the error of predicted differences; None elsewhere."""
    known = known_for(profile)
    if known is None or not known.pairs or share >= known.difference:
        return None
    return (
        f"In {known.pairs} published pairs of settings of one model on one number of devices the predicted "
        f"difference was wrong by up to {known.difference:.0%} (nine of ten): this lead is within that"
    )


def _beyond(entry: Covered, profile: Profile, plan: Plan) -> list[str]:
    """What of the question no row covers."""
    asked = (
        (plan.model.seq_len, "tokens a sequence", entry.seq_len, "{:,}".format),
        (profile.mesh.world, "devices", entry.devices, "{:,}".format),
        (profile.model.parameters, "parameters", entry.parameters, console.count),
    )
    found = [
        f"{said(value)} {unit} (rows: {said(covered.least)} to {said(covered.most)})"
        for value, unit, covered, said in asked
        if value not in covered
    ]
    modelled = profile.modelled
    if profile.model.dtype == "float32":
        found.append("compute in float32 (rows: 16 bits)")
    if modelled is not None and modelled.kernels not in (None, *entry.kernels):
        found.append(f"{modelled.kernels} kernels (rows: {', '.join(entry.kernels)})")
    return found + ["model parallelism"] * (plan.parallel is not None)
