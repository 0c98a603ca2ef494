"""A plan and the profile that it was solved from, which it names by a path relative to itself."""

from __future__ import annotations

from pathlib import Path

from hzplan.errors import UserError
from hzplan.formats.plan import Plan
from hzplan.formats.profile import Profile


def profile_path(path: Path, plan: Plan) -> Path:
    """The path of a plan's profile, relative to the plan at ``path`` or to the file that a link points to."""
    return (
        path.resolve().parent / plan.source.profile
        if path.is_symlink()
        else path.parent / plan.source.profile
    )


def profile_of(path: Path, plan: Plan) -> Profile:
    """The profile of the plan that lies at ``path``; UserError naming the plan when it cannot be read."""
    try:
        return Profile.load(profile_path(path, plan))
    except UserError as error:
        raise UserError(f"{path}: field source.profile: {error}") from None
