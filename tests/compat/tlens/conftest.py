"""Tiny models for the facade's tests, and the check that a model has come through something unharmed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from compat.tlens import HookedTransformer

torch.set_num_threads(1)

Unharmed = Callable[[HookedTransformer], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def load() -> Callable[..., HookedTransformer]:
    """A model of one's own: freshly loaded, with whatever flags."""
    return lambda name="gpt2", **flags: HookedTransformer.from_pretrained(name, **{"device": "cpu"} | flags)


@pytest.fixture(scope="session")
def shared(load: Callable[..., HookedTransformer]) -> Callable[[str], HookedTransformer]:
    """One model for all tests; a test that uses it leaves it as it was."""
    return cache(load)


@pytest.fixture
def gpt2(shared: Callable[[str], HookedTransformer]) -> HookedTransformer:
    """A copy of GPT-2 that a test may do anything to."""
    return copy.deepcopy(shared("gpt2"))


@pytest.fixture(scope="session")
def ids() -> Tensor:
    """Token ids `[batch, pos]` that every tiny model knows."""
    return torch.stack([torch.arange(3, 14), torch.arange(50, 61)])


def hooks_left(model: HookedTransformer) -> list[str]:
    """Where something is still hooked on, or patched over, the tree or the module underneath."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = [*model.named_modules(), *model.engine.model.named_modules()]
    return [name for name, module in modules if any(getattr(module, kind) for kind in kinds) or "forward" in vars(module)]


@pytest.fixture(scope="session")
def unharmed(ids: Tensor) -> Unharmed:
    """After the block nothing is hooked, no context is open, and a plain forward gives the same logits, bit for bit."""

    @contextmanager
    def check(model: HookedTransformer) -> Iterator[None]:
        with torch.no_grad():
            before = model(ids)
            yield
            assert hooks_left(model) == []
            assert model.context_level == 0
            assert torch.equal(model(ids), before)

    return check


@pytest.fixture(scope="session")
def is_close() -> Callable[..., bool]:
    """Whether two tensors agree to a share of the second one's largest magnitude."""

    def check(got: Any, expected: Any, tolerance: float = 1e-5) -> bool:
        same_infinities = torch.equal(got.isinf(), expected.isinf())
        got, expected = (x.detach().nan_to_num(neginf=0.0, posinf=0.0) for x in (got, expected))
        return same_infinities and bool((got - expected).abs().max() <= tolerance * expected.abs().max())

    return check
