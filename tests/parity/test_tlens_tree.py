"""The tree is real: a program that walks, replaces and hooks modules gives TransformerLens' numbers on ours.

A program gets the library, a model of it and token ids, and returns what it saw by name. Each model is a copy, so a
program may do to it what it likes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformer_lens as real_library
from torch import Tensor, nn

import compat.tlens as our_library
from tests.reference import reference_model

torch.set_num_threads(1)

TOLERANCE = 1e-4  # of the largest magnitude of the reference
FAMILIES = ("gpt2", "EleutherAI/pythia-70m", "google/gemma-2-2b")
GROUPED = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B")
IDS = torch.stack([torch.arange(3, 14), torch.arange(50, 61)])
Seen = dict[str, Any]
Program = Callable[[ModuleType, Any, Tensor], Seen]


@cache
def loaded(family: str, **flags: bool) -> SimpleNamespace:
    ours = our_library.HookedTransformer.from_pretrained(family, device="cpu", **flags)
    return SimpleNamespace(theirs=reference_model(family, **flags), ours=ours)


def run_both(program: Program, pair: SimpleNamespace) -> tuple[Seen, Seen]:
    theirs = program(real_library, copy.deepcopy(pair.theirs), IDS)
    return theirs, program(our_library, copy.deepcopy(pair.ours), IDS)


def assert_same(program: Program, family: str, **flags: bool) -> None:
    theirs, ours = run_both(program, loaded(family, **flags))
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        if not isinstance(expected, Tensor):
            assert ours[name] == expected, name
            continue
        assert ours[name].shape == expected.shape, name
        assert torch.equal(ours[name].isinf(), expected.isinf()), name
        expected, got = (x.detach().nan_to_num(neginf=0.0).float() for x in (expected, ours[name]))
        assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1e-6), name


def everything(model: Any, ids: Tensor, **kwargs: Any) -> Seen:
    """Every activation that fires, the output, and the names that exist."""
    out, cache = model.run_with_cache(ids, **kwargs)
    return dict(cache.cache_dict) | {"output": out, "names": set(model.hook_dict)}


def set_deep_attr(root: nn.Module, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        root = root[int(part)] if part.isdigit() else getattr(root, part)
    setattr(root, last, value)


def sparse_autoencoder(library: ModuleType, width: int) -> nn.Module:
    hook_point = library.hook_points.HookPoint

    class SAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rng = torch.Generator().manual_seed(0)
            self.W_enc = nn.Parameter(torch.randn(width, 3 * width, generator=rng) * width**-0.5)
            self.W_dec = nn.Parameter(torch.randn(3 * width, width, generator=rng) * (3 * width) ** -0.5)
            self.hook_sae_input, self.hook_sae_acts_post = hook_point(), hook_point()

        def forward(self, x: Tensor) -> Tensor:
            return self.hook_sae_acts_post(torch.relu(self.hook_sae_input(x) @ self.W_enc)) @ self.W_dec

    return SAE()


def halving(library: ModuleType, inner: nn.Module) -> nn.Module:
    """Calls what it wraps, whatever the arguments, and has a hook point of its own."""

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.hook_half = inner, library.hook_points.HookPoint()

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return self.hook_half(self.inner(*args, **kwargs) * 0.5)

    return Halving()


# --- something else in a hook point's place ---------------------------------------------------------------------------


def splice_sae(path: str, library: ModuleType, model: Any, ids: Tensor) -> Seen:
    width = model.run_with_cache(ids, names_filter=path)[1][path].shape[-1]
    sae = sparse_autoencoder(library, width)
    set_deep_attr(model, path, sae)
    model.setup()
    seen = everything(model, ids)
    assert f"{path}.hook_sae_acts_post" in seen
    model(ids, return_type="loss").backward()
    seen |= {
        "W_enc.grad": sae.W_enc.grad,
        "W_dec.grad": sae.W_dec.grad,
        "listed": any(p is sae.W_enc for p in model.parameters()),
    }
    ablate = (f"{path}.hook_sae_acts_post", lambda acts, hook: acts * (torch.arange(acts.shape[-1]) % 2))
    return seen | {"ablated": model.run_with_hooks(ids, fwd_hooks=[ablate])}


@pytest.mark.parametrize(
    "path", ["blocks.1.hook_resid_post", "blocks.1.mlp.hook_post", "blocks.0.attn.hook_z", "hook_embed"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_sae_takes_a_hook_points_place_with_its_hooks_and_gradients(family: str, path: str) -> None:
    assert_same(partial(splice_sae, path), family)


def hook_point_with_a_forward(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    class Half(library.hook_points.HookPoint):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.5

    model.blocks[1].attn.hook_pattern = Half()
    model.setup()
    add_one = ("blocks.1.attn.hook_pattern", lambda x, hook: x + 1)
    return everything(model, ids) | {"hooked": model.run_with_hooks(ids, fwd_hooks=[add_one])}


def identity_for_a_hook_point(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    model.blocks[1].hook_resid_pre = nn.Identity()
    model.setup()
    return everything(model, ids)


def patched_forward_of_a_hook_point(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    model.blocks[1].hook_attn_out.forward = lambda x: x.roll(1, -2)
    return everything(model, ids)


def torch_hooks_on_hook_points(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    model.blocks[0].hook_mlp_out.register_forward_hook(lambda module, inputs, out: out * 2)
    model.blocks[1].attn.hook_q.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    model.blocks[1].hook_resid_post.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_out[0] * 3,))
    seen = everything(model, ids)
    _, cached = model.run_with_cache(ids, incl_bwd=True, return_type="loss")
    return seen | {"grad": cached["hook_embed_grad"]}


# --- something else in a container's place ----------------------------------------------------------------------------


def transcoder(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    """Its hook points have the names of the MLP's that it replaces; each fires once, with its own value."""

    class Transcoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hook_pre, self.hook_post = library.hook_points.HookPoint(), library.hook_points.HookPoint()

        def forward(self, x: Tensor) -> Tensor:
            return self.hook_post(self.hook_pre(x * 2).sin())

    model.blocks[1].mlp = Transcoder()
    model.setup()
    calls = []

    def double(x: Tensor, hook: Any) -> Tensor:
        calls.append(hook.name)
        return x * 2

    seen = everything(model, ids) | {"edited": model.run_with_hooks(ids, fwd_hooks=[("blocks.1.mlp.hook_pre", double)])}
    return seen | {"calls": calls}


def wrapped(path: str, library: ModuleType, model: Any, ids: Tensor) -> Seen:
    owner, _, last = path.rpartition(".")
    parent = model.get_submodule(owner)
    inner = parent[int(last)] if last.isdigit() else getattr(parent, last)
    set_deep_attr(model, path, halving(library, inner))
    model.setup()
    hooks = [
        (name, lambda x, hook: x * 0.7)
        for name in model.hook_dict
        if f"{path}.inner." in name and name.endswith(("hook_z", "hook_post", "hook_in"))
    ]
    return everything(model, ids) | {"hooked inside": model.run_with_hooks(ids, fwd_hooks=hooks)}


@pytest.mark.parametrize("path", ["blocks.1.mlp", "blocks.1.attn", "blocks.1", "unembed", "embed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_wrapper_around_a_container_calls_it_with_the_hooks_inside(family: str, path: str) -> None:
    assert_same(partial(wrapped, path), family)


def test_wrapper_around_the_position_embedding_calls_it() -> None:
    assert_same(partial(wrapped, "pos_embed"), "gpt2")


def block_that_attends_nowhere(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln1 = nn.LayerNorm(model.cfg.d_model)
            self.hook_resid_post = library.hook_points.HookPoint()

        def forward(self, residual: Tensor, **kwargs: Any) -> Tensor:
            return self.hook_resid_post(residual + self.ln1(residual))

    model.blocks[1] = Plain()
    model.setup()
    seen = everything(model, ids)
    return seen | {"ids": model.generate(ids, max_new_tokens=4, do_sample=False, verbose=False)}


def swapped_blocks(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]
    model.setup()
    zero = ("blocks.0.attn.hook_pattern", lambda x, hook: x * 0.5)
    return everything(model, ids) | {"hooked": model.run_with_hooks(ids, fwd_hooks=[zero])}


def repeated_layer(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    model.blocks[2] = model.blocks[1]
    return {"logits": model(ids)}


def sublayers_of_another_layer(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    model.blocks[0].mlp, model.blocks[2].attn = model.blocks[1].mlp, model.blocks[1].attn
    return {"logits": model(ids)}


def block_of_another_model(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[1].mlp.W_out *= 2
        other.unembed.W_U *= 0.5
    model.blocks[1], model.unembed = other.blocks[1], other.unembed
    model.setup()
    return everything(model, ids)


def patched_forwards(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    def halve(module: nn.Module) -> None:
        forward = module.forward
        module.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 0.5

    for module in (model.blocks[0].mlp, model.blocks[1].attn, model.blocks[2], model.unembed):
        halve(module)
    return everything(model, ids)


def skipped_block(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    model.blocks[1].forward = lambda residual, **kwargs: residual
    return everything(model, ids)  # what is in it stays silent


def hook_before_the_mlp(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    """The way SAELens gives an MLP a hook on its input."""
    for block in model.blocks:
        block.mlp.hook_in = library.hook_points.HookPoint()
        forward = block.mlp.forward
        block.mlp.forward = lambda x, mlp=block.mlp, forward=forward: forward(mlp.hook_in(x))
    model.setup()
    zero = ("blocks.1.mlp.hook_in", lambda x, hook: x * 0)
    return everything(model, ids) | {"hooked": model.run_with_hooks(ids, fwd_hooks=[zero])}


# --- torch hooks on containers ----------------------------------------------------------------------------------------


def torch_hooks_on_containers(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    seen: Seen = {}

    def after(name: str, module: nn.Module, inputs: tuple, out: Tensor) -> Tensor:
        seen[f"after {name}"], seen[f"inputs of {name}"] = out.clone(), len(inputs)
        return out * 0.9

    def before(name: str, module: nn.Module, inputs: tuple) -> tuple:
        seen[f"before {name}"] = inputs[0].clone()
        return (inputs[0] * 0.9,)

    containers = {
        "block": model.blocks[1],
        "attn": model.blocks[1].attn,
        "mlp": model.blocks[1].mlp,
        "embed": model.embed,
        "unembed": model.unembed,
    }
    for name, module in containers.items():
        module.register_forward_hook(partial(after, name))
    for name in ("block", "mlp", "unembed"):
        containers[name].register_forward_pre_hook(partial(before, name))
    return everything(model, ids) | seen


def torch_hooks_with_keywords(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    seen: Seen = {}

    def after(module: nn.Module, args: tuple, kwargs: dict, out: Tensor) -> Tensor:
        seen[type(module).__name__] = (len(args), set(kwargs))
        return out * 0.5

    for module in (model.blocks[1], model.blocks[2].attn, model.blocks[0].mlp):
        module.register_forward_hook(after, with_kwargs=True)
    model.blocks[2].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 0.5,), kwargs), with_kwargs=True)
    return everything(model, ids) | seen


def steering_by_a_torch_hook_on_a_block(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    direction = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(2))
    handle = model.blocks[1].register_forward_hook(lambda module, inputs, out: out + 3 * direction)
    steered = model.generate(ids, max_new_tokens=5, do_sample=False, verbose=False)
    handle.remove()
    return {"steered": steered, "plain": model.generate(ids, max_new_tokens=5, do_sample=False, verbose=False)}


# --- modules called on their own --------------------------------------------------------------------------------------


def stream(model: Any, seed: int = 3) -> Tensor:
    return torch.randn(2, 5, model.cfg.d_model, generator=torch.Generator().manual_seed(seed)) + 0.5


def modules_on_their_own(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    """Queries, keys and values read inputs of their own, and every hook on the way fires, and no other."""
    x, seen = stream(model), {}
    model.add_hook(
        lambda name: not name.endswith(("_in", "_input", "hook_result")),
        lambda value, hook: seen.update({hook.name: value.clone()}),
    )
    seen |= {"block": model.blocks[1](x), "attn": model.blocks[2].attn(x, stream(model, 4), stream(model, 5))}
    seen |= {
        "mlp": model.blocks[0].mlp(x),
        "ln1": model.blocks[0].ln1(x),
        "ln_final": model.ln_final(x),
        "unembed": model.unembed(x),
    }
    seen |= {"embed": model.embed(ids)}
    if hasattr(model, "pos_embed"):
        seen |= {"pos_embed": model.pos_embed(ids), "shifted": model.pos_embed(ids, 3)}
    return seen


def gradients_through_modules(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    calls = {
        "block": model.blocks[1],
        "attn": lambda x: model.blocks[1].attn(x, x, x),
        "mlp": model.blocks[1].mlp,
        "ln_final": model.ln_final,
        "unembed": model.unembed,
    }
    seen = {}
    for name, call in calls.items():
        x = stream(model).requires_grad_()
        call(x).pow(2).sum().backward()
        seen[name] = x.grad
    return seen


def masked_modules(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    """A mask reaches a block and an attention called alone, and wrappers around them in a forward."""
    mask, x = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]), stream(model)
    real = mask.bool()
    seen = {
        "block": model.blocks[1](x, attention_mask=mask)[real],
        "attn": model.blocks[1].attn(x, x, x, attention_mask=mask)[real],
    }
    model.blocks[1].attn, model.blocks[2] = halving(library, model.blocks[1].attn), halving(library, model.blocks[2])
    padded = torch.ones_like(ids)
    padded[0, :4] = 0
    return seen | {"wrapped": model(ids, attention_mask=padded)[padded.bool()]}


# --- the tree itself --------------------------------------------------------------------------------------------------


def the_tree(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    components = library.components
    attention = components.Attention if model.cfg.n_key_value_heads is None else components.GroupedQueryAttention
    block = model.blocks[1]
    return {
        "modules": {name for name, _ in model.named_modules()},
        "mod_dict": set(model.mod_dict),
        "hook order": list(model.hook_dict),
        "names": {name for name, module in model.named_modules() if getattr(module, "name", None) == name},
        "kinds": [
            isinstance(block, components.TransformerBlock),
            isinstance(block.attn, attention) and isinstance(block.attn, components.AbstractAttention),
            isinstance(block.mlp, components.GatedMLP if model.cfg.gated_mlp else components.MLP),
            isinstance(model.embed, components.Embed) and isinstance(model.unembed, components.Unembed),
            isinstance(model.blocks, nn.ModuleList) and isinstance(model, library.HookedRootModule),
            isinstance(block.attn.hook_z, library.hook_points.HookPoint),
        ],
        "class names": [type(module).__name__ for module in (block.ln1, block.attn, block.mlp, model.ln_final)],
        "layers": [model.blocks[2].hook_resid_pre.layer(), block.attn.hook_pattern.layer()],
        "same objects": all(model.hook_dict[name] is model.get_submodule(name) for name in model.hook_dict),
        "attention": [block.attn.attn_type, block.attn.layer_id, round(float(block.attn.attn_scale), 4)],
        "slices": len(model.blocks[1:]),
    }


# --- rules that programs bend -----------------------------------------------------------------------------------------


def soft_cap_turned_off_for_a_while(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    cap, seen = model.cfg.output_logits_soft_cap, {}
    for value in (0.0, 2.0, cap):
        model.cfg.output_logits_soft_cap = value
        seen |= {f"logits {value}": model(ids), f"loss {value}": model(ids, return_type="loss")}
    return seen


def flags_set_on_cfg(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    model.cfg.use_attn_result = model.cfg.use_split_qkv_input = model.cfg.use_hook_mlp_in = True
    seen = everything(model, ids)
    model.cfg.use_attn_result = model.cfg.use_split_qkv_input = model.cfg.use_hook_mlp_in = False
    return seen | {f"off {name}": True for name in everything(model, ids)}


def cached_run_inside_a_cached_run(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    """The outer run's caching hooks see the inner run's values too, and what comes last stays."""
    seen, other = {}, ids[:1, :7]

    def call(x: Tensor, hook: Any) -> Tensor:
        if len(x) == len(ids):
            _, inner = model.run_with_cache(other)
            seen.update({f"inner {name}": value for name, value in inner.items()})
        return x * 0.5

    with model.hooks(fwd_hooks=[("blocks.1.hook_attn_out", call)]):
        return everything(model, ids) | seen


EVERY_FAMILY = (
    hook_point_with_a_forward,
    identity_for_a_hook_point,
    patched_forward_of_a_hook_point,
    torch_hooks_on_hook_points,
    transcoder,
    block_that_attends_nowhere,
    swapped_blocks,
    repeated_layer,
    sublayers_of_another_layer,
    block_of_another_model,
    patched_forwards,
    skipped_block,
    hook_before_the_mlp,
    torch_hooks_on_containers,
    torch_hooks_with_keywords,
    steering_by_a_torch_hook_on_a_block,
    modules_on_their_own,
    gradients_through_modules,
    masked_modules,
    the_tree,
    soft_cap_turned_off_for_a_while,
    flags_set_on_cfg,
    cached_run_inside_a_cached_run,
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("program", EVERY_FAMILY, ids=lambda program: program.__name__)
def test_program_on_the_tree_gives_the_same(program: Program, family: str) -> None:
    assert_same(program, family)


@pytest.mark.parametrize("family", GROUPED)
@pytest.mark.parametrize(
    "program",
    [the_tree, modules_on_their_own, patched_forwards, flags_set_on_cfg],
    ids=lambda program: program.__name__,
)
def test_program_on_the_tree_of_a_grouped_model_gives_the_same(program: Program, family: str) -> None:
    assert_same(program, family)


RAW = dict(fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False)


@pytest.mark.parametrize("program", EVERY_FAMILY, ids=lambda program: program.__name__)
def test_program_on_the_tree_of_an_unprocessed_model_gives_the_same(program: Program) -> None:
    if program is modules_on_their_own:
        pytest.skip("without folded norms, attention called alone takes one input; see below")
    assert_same(program, "google/gemma-2-2b", **RAW)


def embeddings_of_its_own(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    """A model whose class computes what enters block 0 otherwise."""

    class SoftPrompt(type(model)):
        def input_to_embed(self, *args: Any, **kwargs: Any) -> tuple:
            residual, *rest = super().input_to_embed(*args, **kwargs)
            return residual * 0.5, *rest

    model.__class__ = SoftPrompt
    return everything(model, ids) | {"loss": model(ids, return_type="loss")}


@pytest.mark.parametrize("family", FAMILIES)
def test_overridden_input_to_embed_is_what_enters_the_first_block(family: str) -> None:
    assert_same(embeddings_of_its_own, family)


def norms_with_gains(library: ModuleType, model: Any, ids: Tensor) -> Seen:
    seen = {
        "ln1": model.blocks[0].ln1(stream(model)),
        "ln_final": model.ln_final(stream(model)),
        "w": model.blocks[1].ln2.w,
    }
    x = stream(model)
    return seen | {
        "attn": model.blocks[2].attn(x, x, x),
        "block": model.blocks[2](x),
        "b": getattr(model.blocks[1].ln2, "b", None),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_on_their_own_without_processing(family: str) -> None:
    pair = loaded(family, **RAW)
    theirs, ours = norms_with_gains(real_library, pair.theirs, IDS), norms_with_gains(our_library, pair.ours, IDS)
    for name, expected in theirs.items():
        if expected is None:
            assert ours[name] is None
        else:
            assert (ours[name] - expected).abs().max() <= TOLERANCE * expected.abs().max(), name
