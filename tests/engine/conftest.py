"""One engine and one textbook a family, shared by every test that leaves them as they are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from engine.eager.engine import EagerEngine
from tests.engine import tiny
from tests.engine.textbook import Textbook


@pytest.fixture(params=tiny.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return request.param


@pytest.fixture
def engine(name: str, tiny_hub: Any) -> EagerEngine:
    return _engine(name)


@pytest.fixture
def reference(name: str, tiny_hub: Any) -> Any:
    """The family's Hugging Face model, which no engine has touched."""
    return _reference(name)


@pytest.fixture
def book(reference: Any) -> Textbook:
    return Textbook(reference)


_engine, _reference = cache(tiny.new_engine), cache(tiny.hf_model)
