"""A slice along one axis, given as an int, a tuple, a list or an array."""

from __future__ import annotations

import builtins
from typing import Optional, Union

import numpy as np
import torch

from compat.tlens.utilities.tensors import to_numpy

SliceInput = Optional[
    Union[int, tuple[int], tuple[int, int], tuple[int, int, int], list[int], torch.Tensor, np.ndarray]
]


class Slice:
    """What to take along an axis. `mode` says which form was given, `slice` is what numpy and torch understand.

    - None: "identity", everything
    - an int: "int", one index, and the axis goes
    - a tuple or a slice: "slice", the arguments of `slice()`, so (k,) is :k and (j, k) is j:k
    - a list, tensor or array of indices, or a boolean mask: "array"

    ValueError for anything else.
    """

    slice: int | builtins.slice | np.ndarray
    mode: str

    def __init__(self, input_slice: SliceInput = None) -> None:
        match input_slice:
            case None:
                self.mode, self.slice = "identity", builtins.slice(None)
            case int():
                self.mode, self.slice = "int", input_slice
            case tuple():
                self.mode, self.slice = "slice", builtins.slice(*input_slice)
            case builtins.slice():
                self.mode, self.slice = "slice", input_slice
            case list() | torch.Tensor() | np.ndarray():
                self.mode, self.slice = "array", to_numpy(input_slice)
            case _:
                raise ValueError(f"no slice can be made of {input_slice!r}")

    def apply(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """`tensor` sliced along `dim`, which may be negative."""
        index: list[int | builtins.slice | np.ndarray] = [builtins.slice(None)] * tensor.ndim
        index[dim] = self.slice
        return tensor[tuple(index)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray:
        """The indices taken from an axis of `max_ctx` entries, as an int64 array; only an int needs no `max_ctx`."""
        if self.mode == "int":
            return np.array([self.slice], dtype=np.int64)
        if max_ctx is None:
            raise ValueError("max_ctx is needed to list the indices of a slice that is not an int")
        return np.arange(max_ctx, dtype=np.int64)[self.slice]

    def __repr__(self) -> str:
        return f"Slice: {self.slice} Mode: {self.mode} "

    @classmethod
    def unwrap(cls, slice_input: Slice | SliceInput) -> Slice:
        """A Slice as it is, or one made of `slice_input`; here an int keeps its axis, with length 1."""
        if isinstance(slice_input, Slice):
            return slice_input
        return Slice([slice_input] if isinstance(slice_input, int) else slice_input)
