"""FactoredMatrix against TransformerLens', bit for bit: both do the same tensor operations in the same order."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_lens

from compat.tlens.FactoredMatrix import FactoredMatrix

SHAPES = [((6, 3), (3, 6)), ((3, 6), (6, 3)), ((2, 5, 7, 4), (5, 4, 7)), ((5, 4), (2, 4, 5)), ((4, 4), (4, 4))]


def pair(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[FactoredMatrix, Any]:
    """(ours, theirs) of the same random factors."""
    torch.manual_seed(1)
    factors = [torch.randn(shape) for shape in shapes]
    return FactoredMatrix(*factors), transformer_lens.FactoredMatrix(*factors)


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal tensors, or factored matrices of equal factors, or equal values."""
    if isinstance(theirs, transformer_lens.FactoredMatrix):
        assert isinstance(ours, FactoredMatrix) and repr(ours) == repr(theirs)
        ours, theirs = ours.pair, theirs.pair
    if isinstance(theirs, tuple) and not isinstance(theirs, torch.Size):
        assert len(ours) == len(theirs)
        for mine, yours in zip(ours, theirs):
            assert_same(mine, yours)
    elif isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    else:
        assert ours == theirs


METHODS: dict[str, Callable[[Any], Any]] = {
    **{name: operator.attrgetter(name) for name in ("A", "B", "AB", "BA", "T", "U", "S", "V", "eigenvalues", "pair")},
    **{name: operator.attrgetter(name) for name in ("ndim", "shape", "ldim", "mdim", "rdim", "has_leading_dims")},
    **{name: operator.methodcaller(name) for name in ("svd", "norm", "make_even", "collapse_l", "collapse_r")},
    "get_corner": lambda m: m.get_corner(),
    "get_corner of 2": lambda m: m.get_corner(2),
    "unsqueeze": lambda m: m.unsqueeze(0),
    "repr": repr,
    "times a float": lambda m: m * 2.5,
    "a float times": lambda m: 2.5 * m,
    "times a tensor": lambda m: m * torch.tensor(3.0),
    "a tensor times": lambda m: torch.tensor([3.0]) * m,
    "@ vector": lambda m: m @ torch.arange(1.0, m.rdim + 1),
    "vector @": lambda m: torch.arange(1.0, m.ldim + 1) @ m,
    "@ wide": lambda m: m @ torch.linspace(-1, 1, m.rdim * 9).view(m.rdim, 9),
    "wide @": lambda m: torch.linspace(-1, 1, m.ldim * 9).view(9, m.ldim) @ m,
    "@ leading": lambda m: m @ torch.linspace(-1, 1, 3 * m.rdim * 2).view(3, 1, 1, m.rdim, 2),
    "@ factored": lambda m: m @ m,
    "factored @ its transpose": lambda m: m @ m.T,
}


def test_every_public_name_is_here() -> None:
    ours, theirs = pair(SHAPES[0])
    assert {name for name in dir(theirs) if not name.startswith("_")} <= set(dir(ours))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_results_are_identical(shapes: tuple, method: str) -> None:
    ours, theirs = pair(shapes)
    assert_same(METHODS[method](ours), METHODS[method](theirs))


INDICES = [1, -1, (1, 2), slice(1, 2), (None, 1), (0, 1, 3), (0, 1, -1), (0, slice(None), 2, 5), (0, 1, -1, -1)]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_is_identical(index: Any) -> None:
    ours, theirs = pair(SHAPES[2])
    assert_same(ours[index], theirs[index])


@pytest.mark.parametrize("shapes", [((2, 3), (4, 2)), ((2, 3, 4), (5, 4, 2))], ids=str)
def test_bad_shapes_raise_the_same_built_in(shapes: tuple) -> None:
    factors = [torch.ones(shape) for shape in shapes]
    with pytest.raises(Exception) as theirs:
        transformer_lens.FactoredMatrix(*factors)
    with pytest.raises(theirs.type):
        FactoredMatrix(*factors)
