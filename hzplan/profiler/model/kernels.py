"""Seconds of operations on a device, from what its file in ``cost_models/devices/`` says.

Three kinds of kernels. *Matrix products* run tile by tile on the device's multiprocessors: the last wave of
tiles may leave some idle, each tile spends the time of ``product_ramp`` more elements of the inner dimension
on its begin and end, and operands whose rows do not begin at 16 bytes are copied in smaller pieces
(NVIDIA, Matrix Multiplication Background User's Guide). *Fused attention* reaches a share of the peak that
depends on its generation, on the width of heads, and on how many keys a query meets. All *others* are as long
as their bytes take. Kernels are launched by the host, which may be what takes longest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log2
from typing import Literal, get_args

from hzplan.core.layout import Dtype
from hzplan.errors import UserError
from hzplan.formats.cluster import AttentionModel, DeviceModel
from hzplan.profiler.model.operations import Attention, Operated, Operation, Operations, Product, Stream
from hzplan.profiler.model.selective import Recompute

Kernels = Literal["eager", "compiled"]
"""``eager``: each operation is a kernel of its own; ``compiled``: a compiler, or kernels written by hand,
fuse what only moves bytes between two products."""
KERNELS: tuple[Kernels, ...] = get_args(Kernels)

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.75), (128, 64, 0.75), (64, 64, 0.6))
"""Tiles [rows, columns] of a product's result that one multiprocessor computes, and their throughput relative
to the largest: smaller ones load more bytes for each FLOP (128 · 128 / (128 + 128) against
256 · 128 / (256 + 128) elements)."""
ALIGNED = 8
"""Elements of 16 bits in the 16 bytes to which rows must be aligned."""
WIDE = 128
"""Width of heads, elements, from which on attention's throughput does not rise."""
DIAGONAL = 128
"""Keys that a causal kernel computes beyond half of them: it works in blocks."""


@dataclass(frozen=True)
class Pricing:
    """What operations take on a device, in a dtype.

    ``attention``: the generation of its kernel, None: the device's usual one; ``recompute``: what a unit that
    is recomputed computes again.
    """

    device: DeviceModel
    dtype: Dtype
    kernels: Kernels = "eager"
    attention: str | None = None
    recompute: Recompute = "full"
    _known: dict[Operation, float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """UserError for a dtype or a kernel that the device's file does not know."""
        known = self.device.flops_per_s
        if self.dtype not in known:
            raise UserError(f"{self.device.name} has no peak for {self.dtype}; it has {', '.join(known)}")
        if self.attention is not None and self.attention not in self.device.attention:
            listed = ", ".join(self.device.attention) or "none"
            raise UserError(
                f"--attention {self.attention}: {self.device.name} has no such kernel; it has {listed}"
            )

    @property
    def peak(self) -> float:
        """FLOP/s of the data sheet."""
        return self.device.flops_per_s[self.dtype].value

    @property
    def bytes_per_s(self) -> float:
        """Of its memory, as streaming kernels reach it."""
        return self.device.bytes_per_s.value * self.device.bytes_share.value

    def seconds(self, operated: Operated) -> float:
        """Seconds of a use: its kernels one after another, or the host that launches them where that takes
        longer."""
        return self.kernels_s(operated.fused if self.kernels == "compiled" else operated.eager)

    def kernels_s(self, operations: Operations) -> float:
        """Seconds of these kernels."""
        device = sum(count * self.operation(one) for one, count in operations.items())
        return max(device, self.launches(operations) * self.device.launch_s.value)

    def launches(self, operations: Operations) -> int:
        """How many kernels the host launches."""
        return sum(operations.values())

    def operation(self, operation: Operation) -> float:
        """Seconds of one operation on the device."""
        if operation not in self._known:
            self._known[operation] = self._kernel_s + self._bound(operation)
        return self._known[operation]

    @property
    def _kernel_s(self) -> float:
        return self.device.kernel_s.value if self.device.kernel_s is not None else 0.0

    def _bound(self, operation: Operation) -> float:
        """By arithmetic or memory, whichever takes longer (roofline: Williams, Waterman, Patterson 2009)."""
        moved = operation.nbytes / self.bytes_per_s
        if isinstance(operation, Stream):
            return moved
        if isinstance(operation, Attention) and (kernel := self._attention()) is not None:
            return max(moved, self._attention_s(operation, kernel))
        if isinstance(operation, Attention):
            return max(moved, operation.flops / (self.peak * self.device.product_share.value))
        return max(moved, self._product_s(operation))

    def _product_s(self, product: Product) -> float:
        """The fastest of the tiles, in whole waves over all multiprocessors."""
        device = self.device
        ramp = device.product_ramp.value if device.product_ramp is not None else 0
        sms = device.sms.value if device.sms is not None else 1
        rate = self.peak * device.product_share.value
        if device.misaligned_share is not None and any(side % ALIGNED for side in product[1:4]):
            rate *= device.misaligned_share.value
        flops = min(
            ceil(product.batch * ceil(product.m / rows) * ceil(product.n / columns) / sms)
            * sms
            * (2 * rows * columns * (product.k + ramp) / throughput)
            for rows, columns, throughput in TILES
        )
        return flops / rate

    def _attention(self) -> AttentionModel | None:
        """The kernel that was asked for, else the device's first."""
        kernels = self.device.attention
        return kernels[self.attention] if self.attention else next(iter(kernels.values()), None)

    def _attention_s(self, attention: Attention, kernel: AttentionModel) -> float:
        """Causal kernels skip the blocks above the diagonal. Each query's loop over keys has a begin and end
        that take as long as ``ramp`` keys."""
        keys = float(attention.keys)
        if attention.causal:
            keys = min(keys, (attention.keys + DIAGONAL) / 2)
        keys += kernel.ramp.value
        narrow = max(0.0, log2(WIDE / attention.width))
        share = kernel.share.value * float(kernel.narrow_share.value**narrow)
        flops = 2 * attention.passes * attention.sequences * attention.queries * keys * attention.width
        return flops / (self.peak * share)
