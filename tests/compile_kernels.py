"""``python -m tests.compile_kernels``: Triton's kernels compiled for GPUs, which takes none."""

from __future__ import annotations

import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hzplan.runtime.backends import kernels

ARCHITECTURES = (80, 90, 100)
"""A100, H100 and H200, B200."""


def compiled(kernel, arguments, constants, arch):
    """The assembler text and the machine code."""
    source = ASTSource(
        kernel,
        arguments | dict.fromkeys(constants, "constexpr"),
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": kernels.WARPS, "enable_fp_fusion": False}
    found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return found.asm["ptx"], found.asm["cubin"]


def main() -> None:
    """A line for each. AssertionError where registers spill or a division is not exact."""
    for arch, dtype, kind in itertools.product(ARCHITECTURES, ("fp32", "bf16"), kernels.TOPS):
        memory = {"values": f"*{dtype}", "codes": "*u8", "scales": "*fp32"}
        for more in (False, True):
            there = {"top": kernels.TOPS[kind], "whole": kind == "int8", "dithered": more, "measured": more}
            there |= {"rows": kernels.ROWS, "tile_numbers": 1 << 14, "tiny": kernels.TINY}
            numbers = {"tile": "*fp32", "squares": "*fp32", "count": "i32", "first": "i32"}
            text, code = compiled(kernels._pack, memory | numbers, there, arch)
            assert "st.local" not in text and "div.full" not in text and "div.approx" not in text
            print(f"pack {kind} {dtype} sm_{arch}: {len(code)} bytes")
            back = {"whole": kind == "int8", "adds": more, "rows": kernels.ROWS}
            text, code = compiled(kernels._unpack, memory | {"count": "i32"}, back, arch)
            assert "st.local" not in text and "fma" not in text
            print(f"unpack {kind} {dtype} sm_{arch}: {len(code)} bytes")


if __name__ == "__main__":
    main()
