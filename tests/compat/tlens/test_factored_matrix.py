"""FactoredMatrix against plain matrices, with no other library."""

from __future__ import annotations

import pytest
import torch

from compat.tlens.FactoredMatrix import FactoredMatrix
from engine.errors import CompatError


@pytest.fixture
def matrix() -> FactoredMatrix:
    """[2, 3, 7, 7] through a hidden dimension of 4; B has one axis less and is broadcast."""
    torch.manual_seed(0)
    return FactoredMatrix(torch.randn(2, 3, 7, 4), torch.randn(3, 4, 7))


@pytest.mark.parametrize(
    "index",
    [1, -1, (1, 2), (slice(None), 0), (None, 1), (1, 2, 3), (1, 2, -1), (0, 1, slice(2), 5), (0, 1, -1, -1), [0, 1, 1]],
    ids=str,
)
def test_indexing_is_that_of_the_product_with_the_last_two_axes_kept(matrix: FactoredMatrix, index: object) -> None:
    expected = matrix.AB[index]
    found = matrix[index]
    assert isinstance(found, FactoredMatrix)
    assert torch.allclose(found.AB.reshape(expected.shape), expected, atol=1e-5)
    assert found.ndim >= 2


def test_an_ellipsis_stands_for_the_axes_not_named(matrix: FactoredMatrix) -> None:
    assert torch.equal(matrix[..., 2:4].AB, matrix[:, :, :, 2:4].AB)
    assert torch.equal(matrix[0, ...].AB, matrix[0].AB)
    assert matrix[..., -1, :3].shape == (2, 3, 1, 3)


def test_too_many_indices_are_refused(matrix: FactoredMatrix) -> None:
    with pytest.raises(ValueError, match="more indices"):
        matrix[0, 0, 0, 0, 0]


def test_svd_rebuilds_the_matrix_and_is_computed_once(matrix: FactoredMatrix, monkeypatch: pytest.MonkeyPatch) -> None:
    u, s, v = matrix.svd()
    assert torch.allclose(u @ s.diag_embed() @ v.mT, matrix.AB, atol=1e-4)
    monkeypatch.setattr(torch.linalg, "svd", None)
    assert matrix.U is u and matrix.S is s and matrix.V is v


def test_vh_is_v_and_says_so(matrix: FactoredMatrix) -> None:
    with pytest.warns(DeprecationWarning, match="Vh is V"):
        assert torch.equal(matrix.Vh, matrix.V)


def test_eigenvalues_are_the_nonzero_ones_of_the_product(matrix: FactoredMatrix) -> None:
    of_product = torch.linalg.eigvals(matrix.AB)
    largest = of_product.abs().sort(descending=True).values[..., : matrix.mdim]
    assert torch.allclose(matrix.eigenvalues.abs().sort(descending=True).values, largest, atol=1e-3)


def test_half_precision_has_eigenvalues_too(matrix: FactoredMatrix) -> None:
    half = FactoredMatrix(matrix.A.bfloat16(), matrix.B.bfloat16())
    assert half.eigenvalues.dtype == torch.complex64


def test_factors_stay_thin_in_a_product(matrix: FactoredMatrix) -> None:
    product = torch.randn(9, 7) @ matrix @ torch.randn(7, 8)
    assert isinstance(product, FactoredMatrix)
    assert product.shape == (2, 3, 9, 8) and product.mdim == 4


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda m: FactoredMatrix(torch.ones(2, 3), torch.ones(4, 2)), AssertionError),
        (lambda m: FactoredMatrix(torch.ones(2, 3, 4), torch.ones(5, 4, 2)), RuntimeError),
        (lambda m: m @ torch.ones(6, 6), AssertionError),
        (lambda m: torch.ones(6, 6) @ m, AssertionError),
        (lambda m: m * torch.ones(2), AssertionError),
        (lambda m: FactoredMatrix(torch.ones(2, 3), torch.ones(3, 4)).BA, AssertionError),
    ],
)
def test_wrong_shapes_raise_the_originals_error_and_ours(matrix: FactoredMatrix, make, error: type) -> None:
    with pytest.raises(error) as caught:
        make(matrix)
    assert isinstance(caught.value, CompatError)
