"""`HookedTransformer` is a class to build on: subclasses load, add to the tree, override, are copied and freed.

Whole subclasses in the manner of other packages are compared with the real library in tests/parity.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.tlens import HookedTransformer
from compat.tlens.hook_points import HookPoint
from engine.errors import Refused


class WithExtras(HookedTransformer):
    """Takes whatever `from_pretrained` passes on, adds attributes, a module, a parameter and a hook point."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acts_to_saes: dict[str, nn.Module] = {}
        self.probe = nn.Linear(self.cfg.d_model, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.hook_scaled = HookPoint()
        self.setup()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return self.hook_scaled(out * self.scale) if isinstance(out, Tensor) else out


@pytest.fixture
def model() -> WithExtras:
    return WithExtras.from_pretrained("gpt2", device="cpu")


def test_from_pretrained_gives_the_subclass(model: WithExtras, shared: Any, ids: Tensor) -> None:
    assert type(model) is WithExtras and isinstance(model, HookedTransformer)
    assert type(WithExtras.from_pretrained_no_processing("gpt2", device="cpu")) is WithExtras
    assert torch.equal(model(ids), shared("gpt2")(ids))


def test_hook_point_of_a_subclass_is_one_of_the_models(model: WithExtras, ids: Tensor) -> None:
    out, cache = model.run_with_cache(ids)
    assert torch.equal(cache["hook_scaled"], out) and model.hook_scaled.name == "hook_scaled"
    doubled = model.run_with_hooks(ids, fwd_hooks=[("hook_scaled", lambda x, hook: x * 2)])
    assert torch.allclose(doubled, out * 2, atol=1e-4)
    assert model.scale.grad is None
    model(ids).sum().backward()
    assert model.scale.grad is not None


def test_modules_and_parameters_of_a_subclass_are_listed_saved_and_loaded(model: WithExtras) -> None:
    own = {"scale", "probe.weight", "probe.bias"}
    assert own <= dict(model.named_parameters()).keys()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert own <= saved.keys() and not any(name.startswith("transformer.") for name in saved)
    with torch.no_grad():
        model.scale.mul_(3)
    result = model.load_state_dict(saved)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert model.scale.item() == 1
    with pytest.raises(RuntimeError, match="scale"):
        model.load_state_dict({name: value for name, value in saved.items() if name != "scale"})


def test_subclass_is_cast_with_what_it_adds(model: WithExtras, ids: Tensor) -> None:
    model.to(torch.bfloat16)
    assert model.scale.dtype == model.probe.weight.dtype == model(ids).dtype == torch.bfloat16
    model.requires_grad_(False)
    assert not model.scale.requires_grad and not model(ids).requires_grad


def test_subclass_is_copied_pickled_and_freed(model: WithExtras, ids: Tensor) -> None:
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is WithExtras and torch.equal(other(ids), model(ids))
        assert other.scale is not model.scale
    reference = weakref.ref(other)
    del other
    gc.collect()
    assert reference() is None


def test_overridden_pieces_are_what_a_forward_uses(ids: Tensor, shared: Any) -> None:
    class Overriding(HookedTransformer):
        def loss_fn(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().loss_fn(*args, **kwargs) * 10

        def to_tokens(self, input: Any, *args: Any, **kwargs: Any) -> Tensor:
            return super().to_tokens(input.upper() if isinstance(input, str) else input, *args, **kwargs)

        def input_to_embed(self, *args: Any, **kwargs: Any) -> tuple:
            residual, *rest = super().input_to_embed(*args, **kwargs)
            return residual * 0, *rest

    model, plain = Overriding.from_pretrained("gpt2", device="cpu"), shared("gpt2")
    zeros = torch.zeros(*ids.shape, 128)
    assert torch.allclose(model(ids), plain(zeros, start_at_layer=0), atol=1e-5)
    loss = plain(zeros, start_at_layer=0, tokens=ids, return_type="loss")
    assert torch.allclose(model(ids, return_type="loss"), loss * 10, atol=1e-4)
    assert model("some text").shape == plain("SOME TEXT").shape


def test_checks_of_a_subclass_are_asked_before_a_hook_is_added(ids: Tensor) -> None:
    class Strict(HookedTransformer):
        def check_hooks_to_add(self, hook_point: HookPoint, hook_point_name: str, hook: Any, **kwargs: Any) -> None:
            if "mlp" in hook_point_name:
                raise Refused(hook_point_name)

    model = Strict.from_pretrained("gpt2", device="cpu")
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: None)
    with pytest.raises(Refused):
        model.add_hook("blocks.0.mlp.hook_post", lambda x, hook: None)


def test_model_from_a_config_alone_is_refused_with_what_to_do(model: WithExtras) -> None:
    for make in (lambda: HookedTransformer(model.cfg), lambda: WithExtras(model.cfg)):
        with pytest.raises(Refused, match="from_pretrained"):
            make()
