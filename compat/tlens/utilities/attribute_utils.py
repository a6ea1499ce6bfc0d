"""Attributes by dotted path."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


def get_nested_attr(obj: Any, attr_str: str) -> Any:
    """`obj.a.b.c` for "a.b.c". AttributeError where a step is missing."""
    return attrgetter(attr_str)(obj)


def set_nested_attr(obj: Any, attr_str: str, value: Any) -> None:
    """`obj.a.b.c = value` for "a.b.c". AttributeError where a step before the last is missing."""
    parent, _, last = attr_str.rpartition(".")
    setattr(get_nested_attr(obj, parent) if parent else obj, last, value)
