"""The mathematics of ``core.relaxed``, on flat tensors: what is sent, and what becomes of the mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hzplan.core.relaxed import Policy
from hzplan.runtime.host_memory import host_buffer

ELEMENTS = 1 << 22
"""Up to so many are changed at once."""


class Slice:
    """A group's state of one slice of the parameters. ``kept``: by ``Policy.kept``, each as long, in the
    memory that the policy says; computed is where the parameters are."""

    def __init__(self, policy: Policy, values: Tensor) -> None:
        """``values``: the parameters that training begins with, the same in all groups."""
        self.policy = policy
        host = host_buffer(values.device)

        def zeros() -> Tensor:
            if policy.copies == "device":
                return torch.zeros_like(values)
            return host(values.nbytes).view(values.dtype)

        # Without a delay too something is sent, if only from a round's begin to its end.
        self.kept = {name: zeros() for name in dict.fromkeys((*policy.kept(), "outer_sent"))}
        if "outer" in self.kept:
            self.kept["outer"].copy_(values.detach())

    def send(self, values: Tensor, low: int, high: int) -> Tensor:
        """What goes out of elements [low, high); it is kept until the result comes."""
        sent = self.kept["outer_sent"][low:high]
        if self.policy.rule == "periodic":
            return torch.sub(self.kept["outer"][low:high], values[low:high].to(sent.device), out=sent)
        return sent.copy_(values[low:high])

    def advanced(self, mean: Tensor, low: int, high: int) -> dict[str, Tensor]:
        """The outer state that a mean leads to, where the mean is."""
        if self.policy.rule != "periodic":
            return {}
        names = [name for name in self.policy.kept() if name != "outer_sent"]
        return outer_step(self.policy, {n: self.kept[n][low:high].to(mean.device) for n in names}, mean)

    def apply(self, values: Tensor, mean: Tensor, low: int, high: int) -> None:
        """Change elements [low, high) of the parameters by the mean of what groups have sent, wherever that
        lies; piece by piece, for no plan counts the temporaries."""
        for start in range(low, high, ELEMENTS):
            end = min(start + ELEMENTS, high)
            self._apply(values, mean[start - low : end - low].to(values.device), start, end)

    def _apply(self, values: Tensor, mean: Tensor, low: int, high: int) -> None:
        policy, now = self.policy, values[low:high]
        if policy.rule == "periodic":
            found = self.advanced(mean, low, high)
            for name, new in found.items():
                self.kept[name][low:high] = new
            if policy.mixing:
                now.mul_(policy.mixing).add_(found["outer"], alpha=1 - policy.mixing)
            else:
                now.copy_(found["outer"])
            return
        drift = now - self.kept["outer_sent"][low:high].to(now.device)
        if policy.rule == "delta":
            now.copy_(mean).add_(drift)
        elif policy.rule == "plain":
            now.copy_(mean)
        else:
            kept = self.kept["outer_drift"][low:high]
            if bool(kept.any()):
                drift.mul_(1 - policy.decay).add_(kept.to(now.device), alpha=policy.decay)
            kept.copy_(drift)  # which is all of it the first time
            now.copy_(mean).add_(drift)


def outer_step(policy: Policy, kept: Mapping[str, Tensor], mean: Tensor) -> dict[str, Tensor]:
    """torch's SGD with Nesterov momentum on the outer weights, as new tensors."""
    if not policy.momentum:
        return {"outer": kept["outer"] - policy.outer_lr * mean}
    momentum = kept["outer_momentum"] * policy.momentum + mean
    step = mean + policy.momentum * momentum
    return {"outer": kept["outer"] - policy.outer_lr * step, "outer_momentum": momentum}
