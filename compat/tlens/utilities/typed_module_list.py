"""A ModuleList that can be annotated with what it holds."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import nn

T = TypeVar("T", bound=nn.Module)


class TypedModuleList(nn.ModuleList, Generic[T]):
    """`nn.ModuleList`, written `TypedModuleList[Block]` in annotations."""
