"""A dry run's form of `torch.addmm(sum, a, b, out_dtype=..., out=sum)`, for torch before 2.13.

On tensors without memory torch 2.11 computes this operator by the Python function of plain `addmm`, which takes
`out_dtype` for the factor `beta` and raises a TypeError; torch 2.13 has a function of its own for it. On CUDA both are
right. Registered here, the operator is still the one call that a device gets, which dry runs count and check.
Importing this module is enough.
"""

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("aten", "IMPL")  # registered for as long as it lives


def _added(
    sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor, out_dtype: torch.dtype, *, out: Tensor, **factors: float
) -> Tensor:
    """The memory of the result, after torch's checks of a product that is all in one number type."""
    return torch.addmm(sum_MN, a_MK.to(out_dtype), b_KN.to(out_dtype), out=out, **factors)


if torch.__version__ < "2.13":
    _LIBRARY.impl("addmm.dtype_out", _added, "Meta", allow_override=True)
