"""Newton-Schulz iteration: makes the singular values of a matrix about one, and keeps its singular vectors (Jordan et
al. 2024, Muon; Bernstein and Newhouse 2024, arXiv 2409.20325)."""

from collections.abc import Callable

import torch
from torch import Tensor

# Coefficients of the odd polynomial a x + b x^3 + c x^5 that each step applies to singular values: it is steep at 0,
# and the result is only about one (Jordan et al. 2024).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_LEAST_NORM = 1e-7


@torch.no_grad()
def orthogonalise(rows: int, columns: int, fill: Callable[[Tensor], None], steps: int, work: Tensor) -> Tensor:
    """The matrix [rows, columns] that `fill` writes, made orthogonal. It lies in `work`: memory in its number type, for
    two such matrices and two square matrices of the short side."""
    is_tall = rows > columns
    short, long = min(rows, columns), max(rows, columns)
    x, y = (work[i * short * long :][: short * long].view(short, long) for i in range(2))
    squares, sums = (work[2 * short * long + i * short * short :][: short * short].view(short, short) for i in range(2))
    fill(x.T if is_tall else x)
    x.div_(torch.linalg.vector_norm(x).clamp_(min=_LEAST_NORM))
    for _ in range(steps):
        torch.mm(x, x.T, out=squares)
        torch.addmm(squares, squares, squares, beta=_B, alpha=_C, out=sums)
        torch.addmm(x, sums, x, beta=_A, out=y)
        x, y = y, x
    return x.T if is_tall else x
