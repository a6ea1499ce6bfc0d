"""A matrix kept as the product of two thin ones, so that its norm, SVD and eigenvalues cost what the thin ones do."""

from __future__ import annotations

import warnings
from functools import cached_property
from types import EllipsisType
from typing import Any, overload

import torch

from compat.tlens.errors import require
from compat.tlens.utilities.tensors import get_corner, transpose
from engine.errors import BadInput

Index = int | slice | torch.Tensor | list[int] | EllipsisType | None


class CannotBroadcast(BadInput, RuntimeError):
    """Leading dimensions that do not broadcast against each other."""


class FactoredMatrix:
    """A @ B for A `[..., ldim, mdim]` and B `[..., mdim, rdim]`, never multiplied out unless asked for (`AB`).

    Leading dimensions are broadcast; `shape` is `[..., ldim, rdim]`. AssertionError when the inner dimensions differ,
    RuntimeError when the leading ones do not broadcast.
    """

    def __init__(self, A: torch.Tensor, B: torch.Tensor) -> None:
        shapes = f"A is {tuple(A.shape)}, B is {tuple(B.shape)}"
        require(A.size(-1) == B.size(-2), f"the inner dimensions of a factored matrix must match: {shapes}")
        self.ldim, self.mdim, self.rdim = A.size(-2), B.size(-2), B.size(-1)
        self.has_leading_dims = A.ndim > 2 or B.ndim > 2
        try:
            leading = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        except RuntimeError as error:
            raise CannotBroadcast(f"the leading dimensions do not broadcast: {shapes}") from error
        self.shape: torch.Size = leading + (self.ldim, self.rdim)
        self.A = A.broadcast_to(leading + (self.ldim, self.mdim))
        self.B = B.broadcast_to(leading + (self.mdim, self.rdim))

    def __repr__(self) -> str:
        return f"FactoredMatrix: Shape({self.shape}), Hidden Dim({self.mdim})"

    @property
    def ndim(self) -> int:
        """Number of axes of the product."""
        return len(self.shape)

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(A, B)."""
        return self.A, self.B

    @property
    def AB(self) -> torch.Tensor:
        """The product itself, `[..., ldim, rdim]`."""
        return self.A @ self.B

    @property
    def BA(self) -> torch.Tensor:
        """The reverse product, `[..., mdim, mdim]`. AssertionError unless ldim == rdim."""
        require(self.rdim == self.ldim, f"BA needs ldim == rdim, and the shape is {tuple(self.shape)}")
        return self.B @ self.A

    @property
    def T(self) -> FactoredMatrix:
        """The last two axes swapped."""
        return FactoredMatrix(transpose(self.B), transpose(self.A))

    @overload
    def __matmul__(self, other: FactoredMatrix) -> FactoredMatrix: ...
    @overload
    def __matmul__(self, other: torch.Tensor) -> FactoredMatrix | torch.Tensor: ...

    def __matmul__(self, other: torch.Tensor | FactoredMatrix) -> FactoredMatrix | torch.Tensor:
        """A product with a matrix stays factored, around the smaller inner axis; one with a vector is a tensor."""
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        if other.ndim < 2:
            return (self.A @ (self.B @ other.unsqueeze(-1))).squeeze(-1)
        shapes = f"{tuple(self.shape)} @ {tuple(other.shape)}"
        require(other.size(-2) == self.rdim, f"the inner dimensions must match: {shapes}")
        if self.rdim > self.mdim:
            return FactoredMatrix(self.A, self.B @ other)
        return FactoredMatrix(self.AB, other)

    def __rmatmul__(self, other: torch.Tensor | FactoredMatrix) -> FactoredMatrix | torch.Tensor:
        """`other @ self`, as `__matmul__`."""
        if isinstance(other, FactoredMatrix):
            return other.A @ (other.B @ self)
        shapes = f"{tuple(other.shape)} @ {tuple(self.shape)}"
        require(other.size(-1) == self.ldim, f"the inner dimensions must match: {shapes}")
        if other.ndim < 2:
            return ((other.unsqueeze(-2) @ self.A) @ self.B).squeeze(-2)
        if self.ldim > self.mdim:
            return FactoredMatrix(other @ self.A, self.B)
        return FactoredMatrix(other, self.AB)

    def __mul__(self, scalar: float | torch.Tensor) -> FactoredMatrix:
        """Scaled by a number or a tensor of one element; AssertionError for a larger tensor."""
        if isinstance(scalar, torch.Tensor):
            shape = tuple(scalar.shape)
            require(scalar.numel() == 1, f"* takes a scalar, got a tensor of shape {shape}; @ multiplies matrices")
        return FactoredMatrix(self.A * scalar, self.B)

    def __rmul__(self, scalar: float | torch.Tensor) -> FactoredMatrix:
        return self * scalar

    def __getitem__(self, idx: Index | tuple[Index, ...]) -> FactoredMatrix:
        """Indexed like the product, and still factored: an int in one of the last two axes keeps it, with length 1."""
        index = _without_ellipsis(idx if isinstance(idx, tuple) else (idx,), self.ndim)
        match _n_axes(index) - (self.ndim - 2):
            case 1:
                *leading, row = index
                column: Any = slice(None)
            case 2:
                *leading, row, column = index
            case n if n <= 0:
                return FactoredMatrix(self.A[index], self.B[index])
            case _:
                raise ValueError(f"{idx} has more indices than a factored matrix of shape {tuple(self.shape)} has axes")
        return FactoredMatrix(self.A[(*leading, _as_slice(row))], self.B[(*leading, slice(None), _as_slice(column))])

    def unsqueeze(self, k: int) -> FactoredMatrix:
        """A new leading axis of length 1 at `k`."""
        return FactoredMatrix(self.A.unsqueeze(k), self.B.unsqueeze(k))

    def get_corner(self, k: int = 3) -> torch.Tensor:
        """The first `k` entries along every axis of the product, without multiplying the rest."""
        return get_corner(self.A[..., :k, :] @ self.B[..., :, :k], k)

    @cached_property
    def _svd(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # A = Ua Sa Va', B = Ub Sb Vb': what lies between Ua and Vb' is mdim wide, and its SVD completes both ends.
        u_a, s_a, vh_a = torch.linalg.svd(self.A, full_matrices=False)
        u_b, s_b, vh_b = torch.linalg.svd(self.B, full_matrices=False)
        middle = (s_a[..., :, None] * vh_a) @ u_b * s_b[..., None, :]
        u, s, vh = torch.linalg.svd(middle, full_matrices=False)
        return u_a @ u, s, transpose(vh_b) @ transpose(vh)

    def svd(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """U `[..., ldim, k]`, S `[..., k]`, V `[..., rdim, k]`: the matrix is U @ S.diag() @ V.T. Computed once."""
        return self._svd

    @property
    def U(self) -> torch.Tensor:
        """Left singular vectors, as columns `[..., ldim, k]`."""
        return self._svd[0]

    @property
    def S(self) -> torch.Tensor:
        """Singular values, largest first, `[..., k]`."""
        return self._svd[1]

    @property
    def V(self) -> torch.Tensor:
        """Right singular vectors, as columns `[..., rdim, k]`."""
        return self._svd[2]

    @property
    def Vh(self) -> torch.Tensor:
        """The same as `V`, under the name old code uses; despite the h it is not transposed."""
        message = "FactoredMatrix.Vh is V, not its transpose; write .V, or .V.transpose(-2, -1) for the transpose"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self._svd[2]

    @property
    def eigenvalues(self) -> torch.Tensor:
        """Complex eigenvalues `[..., mdim]`, those of BA: AB has the same ones and zeros. Half precision is raised."""
        product = self.BA
        if product.dtype in (torch.bfloat16, torch.float16):
            product = product.to(torch.float32)
        return torch.linalg.eig(product).eigenvalues

    def norm(self) -> torch.Tensor:
        """Frobenius norm, `[...]`."""
        return self.S.pow(2).sum(-1).sqrt()

    def make_even(self) -> FactoredMatrix:
        """The same matrix as (U sqrt(S)) @ (sqrt(S) V'): both factors orthogonal, with equal singular values."""
        root = self.S.sqrt()
        return FactoredMatrix(self.U * root[..., None, :], root[..., :, None] * transpose(self.V))

    def collapse_l(self) -> torch.Tensor:
        """S V', `[..., k, rdim]`: the matrix without its orthogonal left factor, so with the same norms."""
        return self.S[..., :, None] * transpose(self.V)

    def collapse_r(self) -> torch.Tensor:
        """U S, `[..., ldim, k]`: the matrix without its orthogonal right factor."""
        return self.U * self.S[..., None, :]


def _n_axes(index: tuple[Index, ...]) -> int:
    return sum(entry is not None for entry in index)


def _without_ellipsis(index: tuple[Index, ...], ndim: int) -> tuple[Index, ...]:
    places = [place for place, entry in enumerate(index) if entry is ...]
    if len(places) != 1:  # none, or several, which torch refuses
        return index
    before, after = index[: places[0]], index[places[0] + 1 :]
    return (*before, *[slice(None)] * (ndim - _n_axes(before + after)), *after)


def _as_slice(entry: Index) -> Index:
    if isinstance(entry, int):
        return slice(entry, entry + 1 if entry != -1 else None)
    return entry
