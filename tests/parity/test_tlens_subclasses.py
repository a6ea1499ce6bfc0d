"""Subclasses and hosts of `HookedTransformer` as other packages write them, on both libraries with the same numbers.

The classes are written here in the manner of SAELens' HookedSAETransformer and of circuit-tracer's ReplacementModel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import transformer_lens as real_library
from torch import Tensor, nn

import compat.tlens as our_library
from tests.reference import true_sizes

torch.set_num_threads(1)

TOLERANCE = 1e-4  # of the largest magnitude of the reference
FAMILIES = ("gpt2", "google/gemma-2-2b")
IDS = torch.stack([torch.arange(3, 14), torch.arange(50, 61)])
Seen = dict[str, Any]


def compare(program: Callable[[ModuleType], Seen]) -> None:
    with true_sizes():
        theirs = program(real_library)
    ours = program(our_library)
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        if isinstance(expected, Tensor):
            assert ours[name].shape == expected.shape, name
            expected, got = (x.detach().nan_to_num(neginf=0.0) for x in (expected, ours[name]))
            assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1e-6), name
        else:
            assert ours[name] == expected, name


# --- in the manner of SAELens -----------------------------------------------------------------------------------------


def sae_class(library: ModuleType) -> type:
    class SAE(library.HookedRootModule):
        """A sparse autoencoder that is itself a root of hook points."""

        def __init__(self, hook_name: str, width: int, use_error_term: bool = False) -> None:
            super().__init__()
            rng = torch.Generator().manual_seed(width)
            self.hook_name, self.use_error_term = hook_name, use_error_term
            self.W_enc = nn.Parameter(torch.randn(width, 2 * width, generator=rng) * width**-0.5)
            self.W_dec = nn.Parameter(torch.randn(2 * width, width, generator=rng) * (2 * width) ** -0.5)
            for name in ("input", "acts_pre", "acts_post", "recons", "error", "output"):
                setattr(self, f"hook_sae_{name}", library.hook_points.HookPoint())
            self.setup()

        def forward(self, x: Tensor) -> Tensor:
            flat = self.hook_sae_input(x.flatten(2))
            acts = self.hook_sae_acts_post(torch.relu(self.hook_sae_acts_pre(flat @ self.W_enc)))
            recons = self.hook_sae_recons(acts @ self.W_dec)
            if self.use_error_term:
                with torch.no_grad():
                    clean = torch.relu(flat @ self.W_enc) @ self.W_dec
                recons = recons + self.hook_sae_error(flat - clean)
            return self.hook_sae_output(recons).reshape(x.shape)

    return SAE


def get_deep_attr(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = root[int(part)] if part.isdigit() else getattr(root, part)
    return root


def set_deep_attr(root: Any, path: str, value: Any) -> None:
    parent, _, last = path.rpartition(".")
    setattr(get_deep_attr(root, parent) if parent else root, last, value)


def sae_transformer_class(library: ModuleType) -> type:
    class HookedSAETransformer(library.HookedTransformer):
        def __init__(self, *model_args: Any, **model_kwargs: Any) -> None:
            super().__init__(*model_args, **model_kwargs)
            for block in self.blocks:
                block.mlp.hook_in = library.hook_points.HookPoint()
                forward = block.mlp.forward
                block.mlp.forward = lambda x, mlp=block.mlp, forward=forward: forward(mlp.hook_in(x))
            self.setup()
            self.acts_to_saes: dict[str, Any] = {}

        def add_sae(self, sae: Any) -> None:
            assert sae.hook_name in self.acts_to_saes or sae.hook_name in self.hook_dict
            self.acts_to_saes[sae.hook_name] = sae
            set_deep_attr(self, sae.hook_name, sae)
            self.setup()

        def reset_saes(self) -> None:
            for name in self.acts_to_saes:
                set_deep_attr(self, name, library.hook_points.HookPoint())
            self.acts_to_saes = {}
            self.setup()

        @contextmanager
        def saes(self, saes: list[Any]) -> Iterator[Any]:
            try:
                for sae in saes:
                    self.add_sae(sae)
                yield self
            finally:
                self.reset_saes()

        def run_with_saes(self, *args: Any, saes: list[Any], **kwargs: Any) -> Any:
            with self.saes(saes):
                return self(*args, **kwargs)

        def run_with_cache_with_saes(self, *args: Any, saes: list[Any], **kwargs: Any) -> Any:
            with self.saes(saes):
                return self.run_with_cache(*args, **kwargs)

        def run_with_hooks_with_saes(self, *args: Any, saes: list[Any], fwd_hooks: list, **kwargs: Any) -> Any:
            with self.saes(saes):
                return self.run_with_hooks(*args, fwd_hooks=fwd_hooks, **kwargs)

    return HookedSAETransformer


def sae_program(family: str, use_error_term: bool, library: ModuleType) -> Seen:
    model = sae_transformer_class(library).from_pretrained(family, device="cpu")
    cfg, make = model.cfg, partial(sae_class(library), use_error_term=use_error_term)
    saes = [
        make("blocks.1.hook_resid_post", cfg.d_model),
        make("blocks.0.attn.hook_z", cfg.n_heads * cfg.d_head),
        make("blocks.2.mlp.hook_in", cfg.d_model),
        make("blocks.2.hook_mlp_out", cfg.d_model),
    ]
    feature = "blocks.1.hook_resid_post.hook_sae_acts_post"
    with torch.no_grad():
        _, cached = model.run_with_cache_with_saes(IDS, saes=saes)
        seen = {f"cached {name}": value for name, value in cached.items()} | {
            "class": type(model).__name__,
            "plain": model(IDS),
            "with saes": model.run_with_saes(IDS, saes=saes),
            "loss": model.run_with_saes(IDS, saes=saes, return_type="loss"),
            "ablated": model.run_with_hooks_with_saes(
                IDS, saes=saes, fwd_hooks=[(feature, lambda acts, hook: acts * (torch.arange(acts.shape[-1]) != 7))]
            ),
            "plain again": model(IDS),
            "names again": set(model.hook_dict),
        }
        with model.saes(saes):
            seen["generated"] = model.generate(
                IDS, max_new_tokens=3, do_sample=False, verbose=False, use_past_kv_cache=False
            )
    with model.saes(saes):
        model(IDS, return_type="loss").backward()
    return seen | {f"{sae.hook_name} grad": sae.W_dec.grad for sae in saes}


@pytest.mark.parametrize("use_error_term", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_with_saes(family: str, use_error_term: bool) -> None:
    compare(partial(sae_program, family, use_error_term))


# --- in the manner of circuit-tracer ----------------------------------------------------------------------------------


def replacement_class(library: ModuleType) -> type:
    hook_point = library.hook_points.HookPoint

    class ReplacementMLP(nn.Module):
        def __init__(self, old: nn.Module) -> None:
            super().__init__()
            self.old_mlp, self.hook_in, self.hook_out = old, hook_point(), hook_point()

        def forward(self, x: Tensor) -> Tensor:
            return self.hook_out(self.old_mlp(self.hook_in(x)))

    class ReplacementUnembed(nn.Module):
        def __init__(self, old: nn.Module) -> None:
            super().__init__()
            self.old_unembed, self.hook_pre, self.hook_post = old, hook_point(), hook_point()

        @property
        def W_U(self) -> Tensor:
            return self.old_unembed.W_U

        @property
        def b_U(self) -> Tensor:
            return self.old_unembed.b_U

        def forward(self, x: Tensor) -> Tensor:
            return self.hook_post(self.old_unembed(self.hook_pre(x)))

    class ReplacementModel(library.HookedTransformer):
        """A model whose gradients are those of a linear map: attention patterns and norm scales are constants."""

        @classmethod
        def from_pretrained_and_transcoders(cls, name: str, transcoders: nn.ModuleList, **kwargs: Any) -> Any:
            options = dict(fold_ln=False, center_writing_weights=False, center_unembed=False)
            model = cls.from_pretrained(name, **options, **kwargs)
            model.transcoders = transcoders
            for block in model.blocks:
                block.mlp = ReplacementMLP(block.mlp)
            model.unembed = ReplacementUnembed(model.unembed)
            model._stop_gradients()
            for block in model.blocks:
                block.attn.mask = model.blocks[0].attn.mask
            model.setup()
            return model

        def _stop_gradients(self) -> None:
            def detach(x: Tensor, hook: Any) -> Tensor:
                return x.detach()

            for layer, block in enumerate(self.blocks):
                norms = [
                    block.ln1,
                    block.ln2,
                    *(getattr(block, name) for name in ("ln1_post", "ln2_post") if hasattr(block, name)),
                ]
                for point in (block.attn.hook_pattern, *(norm.hook_scale for norm in norms)):
                    point.add_hook(detach, is_permanent=True)
                self._skip(block.mlp, self.transcoders[layer])
            self.ln_final.hook_scale.add_hook(detach, is_permanent=True)
            for parameter in self.parameters():
                parameter.requires_grad = False

            def enable(x: Tensor, hook: Any) -> Tensor:
                x.requires_grad = True
                return x

            self.hook_embed.add_hook(enable, is_permanent=True)

        def _skip(self, mlp: Any, transcoder: nn.Module) -> None:
            kept: dict[str, Tensor] = {}
            mlp.hook_out.hook_out_grad = library.hook_points.HookPoint()

            def keep(x: Tensor, hook: Any) -> None:
                kept["x"] = x

            def linear_only(x: Tensor, hook: Any) -> Tensor:
                through = transcoder(kept.pop("x"))
                return mlp.hook_out.hook_out_grad(through + (x - through).detach())

            mlp.hook_in.add_hook(keep, is_permanent=True)
            mlp.hook_out.add_hook(linear_only, is_permanent=True)

        @contextmanager
        def zero_softcap(self) -> Iterator[None]:
            cap = self.cfg.output_logits_soft_cap
            try:
                self.cfg.output_logits_soft_cap = 0.0
                yield
            finally:
                self.cfg.output_logits_soft_cap = cap

    return ReplacementModel


def replacement_program(family: str, library: ModuleType) -> Seen:
    widths = {"gpt2": (3, 128), "google/gemma-2-2b": (4, 80)}
    n_layers, width = widths[family]
    torch.manual_seed(0)
    transcoders = nn.ModuleList(nn.Linear(width, width) for _ in range(n_layers)).requires_grad_(False)
    model = replacement_class(library).from_pretrained_and_transcoders(family, transcoders, device="cpu")
    grads: Seen = {}

    def note(grad: Tensor, hook: Any) -> None:
        grads[f"grad {hook.name}"] = grad.clone()

    with (
        model.zero_softcap(),
        model.hooks(bwd_hooks=[(lambda name: name.endswith(("hook_out_grad", "hook_embed", "hook_resid_mid")), note)]),
    ):
        logits, cached = model.run_with_cache(IDS)
        logits[0, -1, 5].backward()
    with torch.no_grad():
        capped = model(IDS)
    return (
        grads
        | {"uncapped": logits, "capped": capped, "W_U": model.W_U, "hooks": len(model.list_hooks())}
        | dict(cached.cache_dict)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_replacement_model(family: str) -> None:
    compare(partial(replacement_program, family))


# --- smaller habits ---------------------------------------------------------------------------------------------------


def habits_program(library: ModuleType) -> Seen:
    class Scaled(library.HookedTransformer):
        """Overrides what TransformerLens lets a subclass override."""

        def __init__(self, cfg: Any, *args: Any, temperature: float = 2.0, **kwargs: Any) -> None:
            super().__init__(cfg, *args, **kwargs)
            self.temperature = nn.Parameter(torch.tensor(temperature))
            self.probe = nn.Linear(self.cfg.d_model, 1)
            self.hook_scaled = library.hook_points.HookPoint()
            self.setup()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            return self.hook_scaled(out / self.temperature) if isinstance(out, Tensor) else out

        def loss_fn(self, logits: Tensor, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().loss_fn(logits, tokens, *args, **kwargs) * 10

    model = Scaled.from_pretrained("gpt2", device="cpu")
    names = dict(model.named_parameters())
    optimizer = torch.optim.SGD([names["temperature"]], lr=0.1)
    model(IDS, return_type="loss").backward()
    optimizer.step()
    out, cached = model.run_with_cache(IDS)
    return {
        "loss": model(IDS, return_type="loss"),
        "out": out,
        "hook": cached["hook_scaled"],
        "temperature": model.temperature,
        "probe listed": {"probe.weight", "probe.bias", "temperature"} <= set(names),
        "saved": {"probe.weight", "temperature", "embed.W_E"} <= set(model.state_dict()),
        "both": type(model(IDS, return_type="both")).__name__,
    }


def test_subclass_overrides_forward_and_loss_and_has_parameters_of_its_own() -> None:
    compare(habits_program)


def hosted_program(library: ModuleType) -> Seen:
    class Host(nn.Module):
        """A module that holds a model, as training frameworks do."""

        def __init__(self) -> None:
            super().__init__()
            self.lens = library.HookedTransformer.from_pretrained("gpt2", device="cpu")
            self.head = nn.Linear(self.lens.cfg.d_model, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.lens(ids, stop_at_layer=2))[:, -1]

    torch.manual_seed(0)
    host = Host()
    host.train()
    out = host(IDS)
    out.sum().backward()
    return {"out": out, "grad": host.head.weight.grad, "trained": "head.weight" in dict(host.named_parameters())}


def test_model_inside_another_module() -> None:
    compare(hosted_program)
