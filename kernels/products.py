"""Matrix products inside a kernel, alike where it is compiled and where it is interpreted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def product(a: tl.tensor, b: tl.tensor, DOT: tl.constexpr) -> tl.tensor:
    """a @ b with operands of type DOT, summed in fp32."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="ieee")


def dot_type(x: torch.Tensor) -> tl.dtype:
    """The operands' type for values of x's: bf16 stays, where compiled; the interpreter multiplies fp32 alone."""
    return tl.bfloat16 if x.is_cuda and x.dtype == torch.bfloat16 else tl.float32
