"""Every family of the tiny hub, processed and as it is, as one fixture.

The five that stand for all mechanisms always run; the others that TransformerLens loads are marked slow, and
test_tlens_families.py holds the main promises of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub import FURTHER_NAMES, NAMES
from tests.parity.pairs import Pair, shared_pair


def short(name: str) -> str:
    return name.rpartition("/")[2]


def _case(name: str, *processed: bool) -> object:
    kind = f"-{'processed' if processed[0] else 'raw'}" if processed else ""
    marks = [pytest.mark.slow] if name in FURTHER_NAMES else []
    return pytest.param((name, *processed), marks=marks, id=f"{short(name)}{kind}")


ALL = (*NAMES, *FURTHER_NAMES)
# TransformerLens folds value biases there although a sink takes a share of each row: its logits are not the checkpoint's
WRONG_PROCESSED = ("openai/gpt-oss-20b",)


def served(processed: bool) -> list[str]:
    return [name for name in ALL if not (processed and name in WRONG_PROCESSED)]


@pytest.fixture(params=[_case(name, processed) for processed in (True, False) for name in served(processed)])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair that all tests share; what a test switches on or hooks is undone after it."""
    pair = shared_pair(*request.param)
    yield pair
    pair.reset()


@pytest.fixture(params=[_case(name) for name in served(True)])
def processed_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """`pair` with TransformerLens' default processing only, for what does not hang on it."""
    pair = shared_pair(*request.param, True)
    yield pair
    pair.reset()
