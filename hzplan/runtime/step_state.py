"""What is true of one optimizer step between its first forward and its update."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepState:
    """One step of one rank: made new when the step before has ended or was abandoned, and dropped whole.

    A micro-batch runs as scheduled or unscheduled as a whole. It begins with its first training forward and
    ends with its backward; ``micro_batch`` counts those that have ended.
    """

    open: bool = False
    """Whether the step's first forward has begun."""
    micro_batch: int = 0
    in_micro_batch: bool = False
    in_backward: bool = False
    """Whether a backward has begun and not ended; stays True after one that raised."""
    scheduled: bool = False
    """Whether compute follows the recorded order and background tasks run ahead of it."""
    followed: bool = False
    """Whether any call of a module was the scheduled one."""
    position: int = -1
    """Schedule position of the module call whose turn it is, or was last."""
    in_turn: bool = False
    step_task_started: bool = False
    """Whether compute has waited for all reduced gradients."""
    delivered: set[int] = field(default_factory=set)
    """Ids of the parameters whose gradient of this micro-batch is in its unit's gradient buffer."""
    used: set[int] = field(default_factory=set)
    """Ids of the parameters that had a gradient in any micro-batch of the step, on this rank."""
    begun: set[str] = field(default_factory=set)
    """Units whose gradients of the step before were forgotten."""
    complete: set[str] = field(default_factory=set)
    """Units all of whose gradients of this micro-batch are in their gradient buffers, and nowhere else."""
    reduced: set[str] = field(default_factory=set)
    """Those whose reduction of this micro-batch was launched."""

    def end_micro_batch(self) -> None:
        """Count a micro-batch whose gradients are all reduced, or under way."""
        self.delivered.clear()
        self.complete.clear()
        self.reduced.clear()
        self.in_micro_batch = self.in_backward = False
        self.micro_batch += 1
