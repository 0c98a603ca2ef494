"""Seconds that compute waits for the global gradient norm, under clipping. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hzplan.core.schedule import Schedule
from hzplan.cost.curves import interpolate
from hzplan.formats.profile import Profile


@dataclass(frozen=True)
class Norm:
    """Each rank sums the squares of its gradient slices, then all ranks add up one number. Where each has all
    gradients it may sum them all by itself instead, and does where that is shorter.

    ``sliced_ns`` and ``whole_ns``: nanoseconds of both ways; ``elements``: of all trained tensors.
    """

    sliced_ns: int
    whole_ns: int
    elements: int

    @classmethod
    def of(cls, profile: Profile) -> Norm:
        """Of a profile's model on its cluster."""
        trained = sum(t.spec.numel for unit in profile.units for t in unit.tensors if t.trainable)
        curve = [(point.elements, point.seconds) for point in profile.optimizer.norm or ()]
        summed_s = profile.cluster.norm_seconds or 0.0
        if not curve:
            return cls(round(summed_s * 1e9), round(summed_s * 1e9), trained)
        alone_s = interpolate(curve, trained / profile.mesh.world)
        return cls(round((alone_s + summed_s) * 1e9), round(interpolate(curve, trained) * 1e9), trained)

    def step_ns(self, schedule: Schedule, *, replicated: bool) -> int:
        """Nanoseconds before the updates; 0 without clipping. ``replicated``: whether each rank has all.

        Only a whole choice has that property, and bounds are of sums over units: they count ``share_ns`` of
        each unit that is not replicated, together at most the difference.
        """
        if not schedule.clip:
            return 0
        return min(self.sliced_ns, self.whole_ns) if replicated else self.sliced_ns

    def share_ns(self, elements: int) -> int:
        """The share of the difference that so many elements have."""
        return max(0, self.sliced_ns - self.whole_ns) * elements // self.elements

    def is_local(self, schedule: Schedule, *, replicated: bool) -> bool:
        """Whether each rank takes the norm of all gradients by itself."""
        return schedule.clip and self.whole_ns < self.sliced_ns and replicated
