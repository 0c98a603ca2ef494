"""The mathematics of ``core.relaxed``, on flat tensors: what is sent, and what becomes of the mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hzplan.core.relaxed import Policy


class Slice:
    """A group's state of one slice of the parameters. ``kept``: by ``Policy.kept``, each as long."""

    def __init__(self, policy: Policy, values: Tensor) -> None:
        """``values``: the parameters that training begins with, the same in all groups."""
        self.policy = policy
        self.kept = {
            name: values.detach().clone() if name == "outer" else torch.zeros_like(values)
            for name in policy.kept()
        }
        if "outer_sent" not in self.kept:  # nothing happens between a round's begin and its end
            self.kept["outer_sent"] = torch.zeros_like(values)

    def send(self, values: Tensor, low: int, high: int) -> Tensor:
        """What goes out of elements [low, high); it is kept until the result comes."""
        sent = self.kept["outer_sent"][low:high]
        if self.policy.rule == "periodic":
            return torch.sub(self.kept["outer"][low:high], values[low:high], out=sent)
        return sent.copy_(values[low:high])

    def advanced(self, mean: Tensor, low: int, high: int) -> dict[str, Tensor]:
        """The outer state that a mean leads to."""
        if self.policy.rule != "periodic":
            return {}
        return outer_step(self.policy, {name: of[low:high] for name, of in self.kept.items()}, mean)

    def apply(self, values: Tensor, mean: Tensor, low: int, high: int) -> None:
        """Change elements [low, high) of the parameters by the mean of what groups have sent."""
        policy, now = self.policy, values[low:high]
        if policy.rule == "periodic":
            for name, new in self.advanced(mean, low, high).items():
                self.kept[name][low:high] = new
            outer = self.kept["outer"][low:high]
            if policy.mixing:
                now.mul_(policy.mixing).add_(outer, alpha=1 - policy.mixing)
            else:
                now.copy_(outer)
            return
        drift = now - self.kept["outer_sent"][low:high]
        if policy.rule == "delta":
            now.copy_(mean).add_(drift)
        elif policy.rule == "plain":
            now.copy_(mean)
        else:
            kept = self.kept["outer_drift"][low:high]
            if bool(kept.any()):
                kept.mul_(policy.decay).add_(drift, alpha=1 - policy.decay)
            else:  # the first time
                kept.copy_(drift)
            now.copy_(mean).add_(kept)


def outer_step(policy: Policy, kept: Mapping[str, Tensor], mean: Tensor) -> dict[str, Tensor]:
    """torch's SGD with Nesterov momentum on the outer weights, as new tensors."""
    if not policy.momentum:
        return {"outer": kept["outer"] - policy.outer_lr * mean}
    momentum = kept["outer_momentum"] * policy.momentum + mean
    step = mean + policy.momentum * momentum
    return {"outer": kept["outer"] - policy.outer_lr * step, "outer_momentum": momentum}
