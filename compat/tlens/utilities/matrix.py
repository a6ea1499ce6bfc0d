"""Functions of factored matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compat.tlens.errors import require
from compat.tlens.utilities.tensors import get_corner

if TYPE_CHECKING:
    from compat.tlens.FactoredMatrix import FactoredMatrix


def composition_scores(left: FactoredMatrix, right: FactoredMatrix, broadcast_dims: bool = True) -> torch.Tensor:
    """|left @ right| / (|left| |right|) in Frobenius norms, for every pair of leading indices.

    The leading dimensions of `left` come first in the result, then those of `right`; without `broadcast_dims` they are
    broadcast against each other instead. From "A Mathematical Framework for Transformer Circuits" (Elhage et al. 2021).
    """
    if broadcast_dims:
        n_left, n_right = left.ndim - 2, right.ndim - 2
        for axis in range(n_left):
            right = right.unsqueeze(axis)
        for axis in range(n_left, n_left + n_right):
            left = left.unsqueeze(axis)
    shapes = f"left is {tuple(left.shape)}, right is {tuple(right.shape)}"
    require(left.rdim == right.ldim, f"composition needs left.rdim == right.ldim: {shapes}")
    # Dropping the orthogonal outer factors keeps every norm, and leaves small matrices.
    left_core, right_core = left.collapse_l(), right.collapse_r()
    norms = [matrix.norm(dim=[-2, -1]) for matrix in (left_core @ right_core, right_core, left_core)]
    return norms[0] / norms[1] / norms[2]


def get_matrix_corner(matrix: FactoredMatrix, n: int = 3) -> torch.Tensor:
    """The first `n` entries along every axis, multiplied out."""
    return get_corner(matrix, n).AB
