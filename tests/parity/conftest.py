"""Every family of the tiny hub, processed and as it is, as one fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub import NAMES
from tests.parity.pairs import Pair, shared_pair

CASES = [(name, processed) for name in NAMES for processed in (True, False)]


def short(name: str) -> str:
    return name.rpartition("/")[2]


@pytest.fixture(params=CASES, ids=lambda case: f"{short(case[0])}-{'processed' if case[1] else 'raw'}")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair that all tests share; what a test switches on or hooks is undone after it."""
    pair = shared_pair(*request.param)
    yield pair
    pair.reset()


@pytest.fixture(params=NAMES, ids=short)
def processed_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """`pair` with TransformerLens' default processing only, for what does not hang on it."""
    pair = shared_pair(request.param, True)
    yield pair
    pair.reset()
