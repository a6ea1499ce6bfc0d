"""The same checkpoint under both libraries, and how their numbers are compared.

A tolerance is a share of the largest magnitude on the reference's side; what is not finite must be the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from compat.tlens import HookedTransformer
from tests.reference import reference_model, reference_model_no_processing

TOLERANCE = 2e-5  # float32; what is seen is around 1e-6
# names of one expert alone, and weights of experts that are no softmax over all of them: refused here with the reason
EXPERTS = re.compile(r"blocks\.\d+\.mlp\.(experts\.\d+\.|hook_expert_weights)")
SWITCHES = ("attn_result", "split_qkv_input", "hook_mlp_in", "attn_in")


@dataclass(frozen=True)
class Pair:
    """One checkpoint: our model, and the real TransformerLens' model."""

    name: str
    processed: bool
    ours: Any
    theirs: Any

    def switch(self, *switches: str) -> None:
        """Turn these on and all others off, on both."""
        for model in (self.ours, self.theirs):
            for switch in SWITCHES:
                on = switch in switches
                if on or getattr(model.cfg, f"use_{switch}"):
                    getattr(model, f"set_use_{switch}")(on)

    @property
    def switches(self) -> tuple[str, ...]:
        """Those that this family has: with grouped queries, one copy a query head cannot feed keys and values."""
        return SWITCHES if self.theirs.cfg.n_key_value_heads is None else SWITCHES[:3]

    def both(self, act: Callable[[Any], Any]) -> tuple[Any, Any]:
        """(what `act` gives on ours, on theirs), with the same seed."""
        results = []
        for model in (self.ours, self.theirs):
            torch.manual_seed(0)
            _forget_linear_biases(model)
            results.append(act(model))
        return tuple(results)

    def reset(self) -> None:
        for model in (self.ours, self.theirs):
            model.reset_hooks(including_permanent=True)
        self.switch()


def _forget_linear_biases(model: Any) -> None:
    """TransformerLens keeps the biases of its longest prompt, and cuts those of a shorter one out at the wrong queries."""
    for block in model.blocks:
        if getattr(block.attn, "alibi", None) is not None:
            block.attn.alibi = None


def new_pair(name: str, processed: bool = True) -> Pair:
    """A pair of its own, for a test that changes weights."""
    if processed:
        return Pair(name, True, HookedTransformer.from_pretrained(name, device="cpu"), reference_model(name))
    ours = HookedTransformer.from_pretrained_no_processing(name, device="cpu")
    return Pair(name, False, ours, reference_model_no_processing(name))


shared_pair = lru_cache(maxsize=None)(new_pair)


def random_tokens(pair: Pair, rows: int = 2, pos: int = 9, seed: int = 0) -> Tensor:
    """Ids `[rows, pos]` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 400, (rows, pos), generator=generator)


def error(found: Tensor, expected: Tensor, floor: float = 1e-9) -> float:
    """The largest difference as a share of the largest finite expected magnitude, or of `floor` where that is more.

    inf where the two cannot be compared: another shape or dtype, or other entries that are not finite.
    """
    found, expected = found.detach(), expected.detach()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    finite = torch.isfinite(expected)
    if (
        not torch.equal(found.nan_to_num(1)[~finite], expected.nan_to_num(1)[~finite])
        or not found[finite].isfinite().all()
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    largest = expected[finite].abs().max().clamp(min=floor)
    return float((found - expected)[finite].abs().max() / largest)


def assert_close(found: Any, expected: Any, what: str = "", tolerance: float = TOLERANCE, floor: float = 1e-9) -> None:
    """Tensors, or tuples and lists of tensors, that agree in shape, dtype and value."""
    if expected is None or isinstance(expected, (str, int, bool)):
        assert found == expected, what
    elif isinstance(expected, (tuple, list)):
        assert isinstance(found, (tuple, list)) and len(found) == len(expected), what
        for index, (mine, other) in enumerate(zip(found, expected)):
            assert_close(mine, other, f"{what}[{index}]", tolerance, floor)
    else:
        off = error(found.detach(), expected.detach(), floor)
        assert off <= tolerance, f"{what}: {_shown(found)} is off by {off:.1e} of the largest of {_shown(expected)}"


def assert_same_cache(
    found: Any, expected: Any, tolerance: float = TOLERANCE, floor: float = 1e-9, leave_out: Iterable[str] = ()
) -> None:
    """Caches (or dicts) with the same names in the same order and the same values under them; EXPERTS may be missing."""
    shared = [key for key in expected.keys() if key in found or not EXPERTS.match(key)]
    assert list(found.keys()) == shared
    off = {key: error(found[key], expected[key], floor) for key in shared if key not in leave_out}
    wrong = {key: f"{value:.1e}" for key, value in off.items() if not value <= tolerance}
    assert not wrong, wrong


def assert_same_gradients(pair: Pair, found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Every cached name.

    A norm on queries and keys makes these blind to the scale before them, whose gradient is then 0 but for rounding;
    that one is held to the largest of all gradients.
    """
    blind = "blocks.0.attn.q_norm.hook_scale" in pair.theirs.hook_dict
    nearly_zero = [name for name in expected.keys() if blind and name.endswith("ln1.hook_scale_grad")]
    assert_same_cache(found, expected, tolerance, leave_out=nearly_zero)
    largest = max(float(value.abs().max()) for name, value in expected.items() if name.endswith("_grad") and name in found)
    for name in nearly_zero:
        assert_close(found[name], expected[name], name, tolerance, floor=largest)


def _shown(tensor: Any) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
