"""Random probes of matrices that exist only as products: trace, Frobenius norm, spectral norm, range.

An attention matrix A is n x n and never formed; A @ X is one attention call with the values replaced by X.
These estimators need nothing else. For Q K^T itself none of them is needed: its spectrum is exact from small
Grams.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""Maps `[…, n, m]` to `[…, n, m]`: the product of an implicit square matrix with m vectors."""


def rademacher(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Returns random signs, +1 or -1 with equal chance."""
    return torch.randint(0, 2, shape, generator=generator).to(dtype).mul_(2).sub_(1)


def hutchinson_trace(
    product: Product, size: int, probes: int, generator: torch.Generator
) -> tuple[float, float]:
    """Returns an unbiased estimate of the trace of an implicit matrix and its standard error (Hutchinson, 1989)."""
    signs = rademacher((size, probes), generator)
    samples = (signs * product(signs)).sum(0)
    return float(samples.mean()), float(samples.std(unbiased=True) / probes**0.5) if probes > 1 else float(
        "inf"
    )


def frobenius_distance(
    first: Product, second: Product, size: int, probes: int, generator: torch.Generator
) -> float:
    """Returns an estimate of `||A - B||_F` of two implicit matrices: `E ||(A - B) z||^2 = ||A - B||_F^2`.

    With attention operators, one call each with `probes` random value vectors compares two kernels without
    forming their matrices.
    """
    signs = rademacher((size, probes), generator)
    return float((first(signs) - second(signs)).square().sum().div(probes).sqrt())


def power_iteration(
    product: Product, transposed: Product, size: int, *, steps: int = 100, tolerance: float = 1e-6
) -> tuple[float, Tensor]:
    """Returns the largest singular value of an implicit matrix and its right singular vector `[size]`.

    Deterministic: the start is a fixed vector with no zero entries. The error after k steps falls like
    (sigma_2 / sigma_1)^(2k); `tolerance` stops on the relative change of the estimate.
    """
    vector = torch.linspace(1.0, 2.0, size, dtype=torch.float64)
    vector = vector * torch.where(torch.arange(size) % 3 == 1, -1.0, 1.0)
    vector = vector / vector.norm()
    value = 0.0
    for _ in range(steps):
        image = product(vector[:, None])
        back = transposed(image)[:, 0]
        previous, value = value, float(image.norm())
        length = back.norm()
        if float(length) == 0.0:
            return 0.0, vector
        vector = back / length
        if abs(value - previous) <= tolerance * value:
            break
    return float(product(vector[:, None]).norm()), vector


def range_finder(
    product: Product,
    transposed: Product,
    size: int,
    rank: int,
    generator: torch.Generator,
    *,
    oversample: int = 8,
    power_steps: int = 1,
) -> Tensor:
    """Returns orthonormal columns `[size, rank + oversample]` that nearly span the range of an implicit matrix.

    Halko, Martinsson and Tropp (2011), algorithm 4.4: QR after every product keeps small directions from
    drowning. Right for the softmax matrix of a diffuse bidirectional head, the one place where a matrix here
    is implicit and n x n.
    """
    width = min(size, rank + oversample)
    sketch = torch.randn(size, width, generator=generator, dtype=torch.float64)
    basis: Tensor = torch.linalg.qr(product(sketch)).Q
    for _ in range(power_steps):
        basis = torch.linalg.qr(product(torch.linalg.qr(transposed(basis)).Q)).Q
    return basis
