"""Closer to the truth than the original: a float64 run of the raw model is the referee of both float32 runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compat.tlens as tl
from tests import hub, reference

ROUNDOFF = 2.0**-24  # of float32: means closer than that are the same distance


def distances(got: Any, truth: Any) -> dict[str, float]:
    """Of every cached name, the largest distance from the truth as a share of the largest magnitude there."""
    far = {}
    for name, exact in truth.items():
        finite = torch.isfinite(exact)
        error = (got[name].double() - exact)[finite].abs().max()
        far[name] = float(error / exact[finite].abs().max().clamp(min=1e-12))
    return far


def caches(name: str, tokens: Tensor) -> tuple[dict[str, float], dict[str, float]]:
    """(ours, TransformerLens') distances from the float64 run."""
    with torch.no_grad():
        exact = tl.HookedTransformer.from_pretrained(name, device="cpu", dtype=torch.float64)
        truth = exact.run_with_cache(tokens)[1]
        ours = tl.HookedTransformer.from_pretrained(name, device="cpu").run_with_cache(tokens)[1]
        theirs = reference.reference_model(name).run_with_cache(tokens)[1]
    return distances(ours, truth), distances(theirs, truth)


def check(name: str, tokens: Tensor) -> None:
    ours, theirs = caches(name, tokens)
    mean = lambda far: sum(far.values()) / len(far)  # noqa: E731
    print(f"{name}: largest distance ours {max(ours.values()):.2e}, TransformerLens {max(theirs.values()):.2e}")
    print(f"{name}: mean distance ours {mean(ours):.2e}, TransformerLens {mean(theirs):.2e}")
    assert mean(ours) <= mean(theirs) + ROUNDOFF
    assert max(ours.values()) <= max(theirs.values()) + 4 * ROUNDOFF


@pytest.mark.parametrize("name", hub.NAMES)
def test_processed_activations_are_no_farther_from_a_float64_run_than_transformer_lens(name: str, tiny_hub: Any) -> None:
    check(name, torch.randint(5, 300, (4, 16), generator=torch.Generator().manual_seed(0)))


@pytest.mark.slow
def test_so_they_are_on_a_real_model() -> None:
    from demo.real_models import SMOLLM2

    hub.ensure_real(SMOLLM2)
    check(SMOLLM2, torch.randint(5, 40_000, (1, 64), generator=torch.Generator().manual_seed(0)))
