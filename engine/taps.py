"""Taps: Python functions on addresses, and the one place where what they return is checked.

A tap sees the value at its address with a batch axis and returns None or a replacement; an in-place edit counts.
Several taps at one address run in order, each seeing the last one's result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import BadReplacement
from engine.points import Address


@dataclass(frozen=True)
class Tap:
    """A function on an address.

    `reads` promises that it neither edits in place nor returns anything, nor asks for the gradient of what it is handed.
    """

    address: Address
    fn: Callable[[Tensor], Tensor | None]
    reads: bool = False


class Taps:
    """The live set of one run: taps may be added while the forward runs, for what lies ahead."""

    def __init__(self, taps: Iterable[Tap] = ()) -> None:
        self._at: dict[Address, list[Tap]] = {}
        self._fired: set[int] = set()
        self.on_add: Callable[[Address], None] | None = None
        for tap in taps:
            self.add(tap)

    def add(self, tap: Tap) -> None:
        self._at.setdefault(tap.address, []).append(tap)
        if self.on_add is not None:
            self.on_add(tap.address)

    def __contains__(self, address: Address) -> bool:
        return address in self._at

    def addresses(self) -> Iterable[Address]:
        return self._at.keys()

    def unfired(self) -> Iterable[Address]:
        """Where a tap of this run was never called, one that was added when the forward had passed included."""
        return [tap.address for taps in self._at.values() for tap in taps if id(tap) not in self._fired]

    def begin(self, on_add: Callable[[Address], None]) -> None:
        """Opens a run: nothing has fired, and `on_add` hears of what is added."""
        self._fired.clear()
        self.on_add = on_add

    def writes(self, address: Address) -> bool:
        """Whether any tap here may change the value."""
        return any(not tap.reads for tap in self._at.get(address, ()))

    def fire(self, address: Address, value: Tensor) -> Tensor:
        """Runs the taps here on `value` and returns what the forward must continue with."""
        for tap in tuple(self._at.get(address, ())):
            self._fired.add(id(tap))
            result = tap.fn(value)
            if result is not None and not tap.reads:
                value = checked(address, value, result)
        return value


def checked(address: Address, old: Tensor, new: object) -> Tensor:
    """`new`, if it can stand in for `old`; else `BadReplacement` naming the point, what came and what was due."""
    if not isinstance(new, Tensor):
        raise BadReplacement(f"a hook at {address} returned {type(new).__name__}; return a tensor, or None for no change")
    if new.shape != old.shape or new.dtype != old.dtype:
        raise BadReplacement(
            f"a hook at {address} returned {_describe(new)}, but the value there is {_describe(old)}; "
            "return a tensor of the same shape and dtype, or None for no change"
        )
    return new if new.device == old.device else new.to(old.device)


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def same(a: Tensor, b: Tensor) -> bool:
    """Whether `b` still holds `a`'s numbers, NaN included; how an edit through `.data` is noticed."""
    return a is b or torch.equal(a, b) or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
