"""Closer to the truth than the original: a float64 run of the raw model is the referee of both float32 runs."""

from __future__ import annotations

from statistics import mean, stdev
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


def check(name: str, prompts: list[Tensor]) -> None:
    """Over several prompts, since on one the last bits of a rounding decide.

    Of the mean distance over all names, and of the largest: ours less theirs, prompt by prompt, must not be above 0 by
    more than chance explains, which is twice the standard error of its mean.
    """
    with torch.no_grad():
        models = {
            "exact": tl.HookedTransformer.from_pretrained(name, device="cpu", dtype=torch.float64),
            "ours": tl.HookedTransformer.from_pretrained(name, device="cpu"),
            "theirs": reference.reference_model(name),
        }
        far: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
        for tokens in prompts:
            seen = {side: model.run_with_cache(tokens)[1] for side, model in models.items()}
            for side, each in far.items():
                each.append(distances(seen[side], seen["exact"]))
    for what, of in (("mean", mean), ("largest", max)):
        ours, theirs = ([of(each.values()) for each in far[side]] for side in ("ours", "theirs"))
        farther = [a - b for a, b in zip(ours, theirs)]
        print(f"{name}: {what} distance ours {mean(ours):.2e}, TransformerLens {mean(theirs):.2e}")
        assert mean(farther) <= ROUNDOFF + 2 * stdev(farther) / len(farther) ** 0.5


def prompts(d_vocab: int, rows: int, length: int, n: int) -> list[Tensor]:
    generators = [torch.Generator().manual_seed(seed) for seed in range(n)]
    return [torch.randint(5, d_vocab, (rows, length), generator=generator) for generator in generators]


@pytest.mark.parametrize("name", hub.NAMES)
def test_processed_activations_are_no_farther_from_a_float64_run_than_transformer_lens(name: str, tiny_hub: Any) -> None:
    check(name, prompts(300, 4, 16, n=6))


@pytest.mark.slow
def test_so_they_are_on_a_real_model() -> None:
    from demo.real_models import SMOLLM2

    hub.ensure_real(SMOLLM2)
    check(SMOLLM2, prompts(40_000, 1, 64, n=12))
