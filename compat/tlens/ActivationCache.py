"""`ActivationCache`: the activations of one run, and the ways of taking the residual stream apart.

Shapes below leave out the batch axis after `remove_batch_dim`, and the position axis after an int `pos_slice`.
The residual stream is a sum of what each component wrote, and a norm whose scale is taken as given is linear, so
contributions can be read off term by term (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits").
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections import Counter
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any, Literal, Optional, Union

import torch
from torch import Tensor

from compat.tlens.errors import require
from compat.tlens.utils import Slice, SliceInput, get_act_name, warn_if_mps
from engine.errors import BadInput, Refused, UnknownName

SliceLike = Union[Slice, SliceInput]
MaybeLabelled = Union[Tensor, tuple[Tensor, list[str]]]
NORMS = ("LN", "LNPre", "RMS", "RMSPre")
CENTRED_NORMS = ("LN", "LNPre")


class NoRecurrentMixer(Refused, TypeError):
    """Recurrent-state methods on a model whose blocks hold attention."""


class ModelLeftBehind:
    """Stands where the model was in a saved cache whose model could not be pickled: its config, and no weights."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refused(f"this cache was saved without its model, so model.{name} is gone; set cache.model = model first")


class ActivationCache:
    """A dict of activations by full hook name, with short names and the decompositions of the residual stream.

    `cache["blocks.3.attn.hook_z"]`, `cache["z", 3]`, `cache["z3"]` and, counting layers from the end, `cache["z", -1]`
    are ways to ask. The model is kept, for its config and weights; `cache.model = None` lets go of it.
    """

    def __init__(self, cache_dict: dict[str, Tensor], model: Any, has_batch_dim: bool = True) -> None:
        self.cache_dict = cache_dict
        self.model = model
        self.has_batch_dim = has_batch_dim
        self.has_embed = "hook_embed" in cache_dict
        self.has_pos_embed = "hook_pos_embed" in cache_dict

    # ---- a dict of tensors

    def __getitem__(self, key: Any) -> Tensor:
        """The activation of a full name, a short name, or `(short name, layer, layer type)`. KeyError for any other."""
        if key in self.cache_dict:
            return self.cache_dict[key]
        if isinstance(key, str):
            name = get_act_name(key)
        else:
            if len(key) > 1 and key[1] is not None and key[1] < 0:
                key = (key[0], self.model.cfg.n_layers + key[1], *key[2:])
            name = get_act_name(*key)
        if name not in self.cache_dict:
            hint = f"asked for as {key!r}; a cache holds what the run's names_filter let through"
            raise UnknownName(name, self.cache_dict, what="cached activation", hint=hint)
        return self.cache_dict[name]

    def __len__(self) -> int:
        return len(self.cache_dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __repr__(self) -> str:
        return f"ActivationCache with keys {list(self.cache_dict)}"

    def keys(self) -> KeysView[str]:
        return self.cache_dict.keys()

    def values(self) -> ValuesView[Tensor]:
        return self.cache_dict.values()

    def items(self) -> ItemsView[str, Tensor]:
        return self.cache_dict.items()

    def to(self, device: Union[str, torch.device]) -> ActivationCache:
        """Move every activation, in place. The model stays where it is."""
        warn_if_mps(device)
        self.cache_dict = {name: value.to(device) for name, value in self.cache_dict.items()}
        return self

    def toggle_autodiff(self, mode: bool = False) -> None:
        """Switch autograd on or off for the whole program."""
        logging.warning("autograd is now %s for the whole program", "on" if mode else "off")
        torch.set_grad_enabled(mode)

    def remove_batch_dim(self) -> ActivationCache:
        """Drop the leading axis of length 1 from every activation, in place. AssertionError for a larger batch."""
        if not self.has_batch_dim:
            logging.warning("the batch axis of this cache is already removed")
            return self
        size = self._batch_size()
        require(size == 1, f"cannot remove the batch axis of a cache of batch size {size}")
        for name, value in self.cache_dict.items():
            if value.ndim > 0 and value.size(0) == 1:
                self.cache_dict[name] = value[0]
        self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: SliceLike) -> ActivationCache:
        """A new cache of some batch items; an int takes one item and its batch axis away."""
        batch_slice = _as_slice(batch_slice)
        require(self.has_batch_dim, "cannot take batch items from a cache without a batch axis")
        size = self._batch_size()
        sliced = {
            name: batch_slice.apply(value, dim=0) if value.ndim > 0 and value.size(0) == size else value
            for name, value in self.cache_dict.items()
        }
        return ActivationCache(sliced, self.model, has_batch_dim=batch_slice.mode != "int")

    def _batch_size(self) -> int:
        # the commonest leading size: entries broadcast over the batch have 1, and flattened expert rows more
        sizes = Counter(value.size(0) for value in self.cache_dict.values() if value.ndim > 0)
        return sizes.most_common(1)[0][0] if sizes else 1

    # ---- copies and files

    def __copy__(self) -> ActivationCache:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict) -> ActivationCache:
        """A cache with tensors of its own over the same model."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        others = {name: value for name, value in self.__dict__.items() if name != "model"}
        twin.__dict__.update(copy.deepcopy(others, memo))
        return twin

    def __getstate__(self) -> dict:
        state = dict(self.__dict__)
        if not _can_be_pickled(self.model):
            state["model"] = ModelLeftBehind(getattr(self.model, "cfg", None))
        return state

    # ---- the residual stream, layer by layer

    def accumulated_resid(
        self,
        layer: Optional[int] = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Optional[SliceLike] = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> MaybeLabelled:
        """The stream at the input of every layer up to `layer` (None and -1: the last), `[n, batch, pos, d_model]`.

        `incl_mid` adds the stream between attention and MLP, `mlp_input` does so for the last layer alone. `apply_ln`
        normalizes each stream as the input of `layer`: with statistics of its own at the unembedding (the logit lens),
        with the cached scale before.
        """
        pos_slice, layer, n_layers = _as_slice(pos_slice), self._up_to(layer), self.model.cfg.n_layers
        asked = []
        for each in range(layer + 1):
            if each == n_layers:
                asked.append((("resid_post", each - 1), "final_post"))
                continue
            asked.append((("resid_pre", each), f"{each}_pre"))
            if (incl_mid and each < layer) or (mlp_input and each == layer):
                asked.append((("resid_mid", each), f"{each}_mid"))
        stack = torch.stack([pos_slice.apply(self[key], dim=-2) for key, _ in asked], dim=0)
        if apply_ln:
            stack = self.apply_ln_to_stack(
                stack,
                layer,
                mlp_input=mlp_input,
                pos_slice=pos_slice,
                has_batch_dim=self.has_batch_dim,
                recompute_ln=layer == n_layers,
            )
        return (stack, [label for _, label in asked]) if return_labels else stack

    def decompose_resid(
        self,
        layer: Optional[int] = None,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: SliceLike = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> MaybeLabelled:
        """What embeddings, attentions and MLPs before `layer` wrote to the stream, `[n, batch, pos, d_model]`.

        With `incl_embeds` and `mode="all"` they sum to the stream. `mlp_input` counts the attention of `layer` in.
        """
        pos_slice, layer = _as_slice(pos_slice), self._up_to(layer)
        use_attn, use_mlp = mode != "mlp", mode != "attn" and not self.model.cfg.attn_only
        asked = self._embeddings() if incl_embeds else []
        for each in range(layer):
            asked += [(("attn_out", each), f"{each}_attn_out")] * use_attn
            asked += [(("mlp_out", each), f"{each}_mlp_out")] * use_mlp
        if mlp_input and use_attn:
            asked.append((("attn_out", layer), f"{layer}_attn_out"))
        stack = torch.stack([pos_slice.apply(self[key], dim=-2) for key, _ in asked], dim=0)
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, pos_slice=pos_slice, mlp_input=mlp_input)
        return (stack, [label for _, label in asked]) if return_labels else stack

    def stack_activation(
        self, activation_name: str, layer: int = -1, sublayer_type: Optional[str] = None
    ) -> Tensor:
        """One activation of all layers before `layer` (None and -1: of all), `[n_layers, ...]`."""
        return torch.stack([self[(activation_name, each, sublayer_type)] for each in range(self._up_to(layer))], dim=0)

    # ---- heads

    def compute_head_results(self) -> None:
        """Cache what each head wrote, `z W_O`, `[batch, pos, head, d_model]`; with b_O they sum to attn_out."""
        if self._has_head_results():
            logging.warning("head results are already in this cache")
            return
        for layer in range(self.model.cfg.n_layers):
            by_width = self[("z", layer, "attn")][..., None] * self.model.blocks[layer].attn.W_O
            self.cache_dict[f"blocks.{layer}.attn.hook_result"] = by_width.sum(dim=-2)

    def stack_head_results(
        self,
        layer: int = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: SliceLike = None,
        apply_ln: bool = False,
    ) -> MaybeLabelled:
        """What each head before `layer` wrote, `[layer * n_heads, batch, pos, d_model]`, labels "L0H0".

        `incl_remainder` appends the rest of the stream, so that the stack sums to it.
        """
        pos_slice, layer = _as_slice(pos_slice), self._up_to(layer)
        if not self._has_head_results():
            self.compute_head_results()
        labels = [f"L{each}H{head}" for each in range(layer) for head in range(self.model.cfg.n_heads)]
        results = [pos_slice.apply(self[("result", each, "attn")], dim=-3) for each in range(layer)]
        stack = torch.cat(results, dim=-2).movedim(-2, 0) if results else self._empty_stack(pos_slice)
        if incl_remainder:
            stack = torch.cat([stack, self._stream(layer, pos_slice)[None] - stack.sum(dim=0, keepdim=True)], dim=0)
            labels.append("remainder")
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, pos_slice=pos_slice)
        return (stack, labels) if return_labels else stack

    def _has_head_results(self) -> bool:
        # an entry without a head axis belongs to another vocabulary and is computed anew
        result = self.cache_dict.get("blocks.0.attn.hook_result")
        return result is not None and result.ndim >= (4 if self.has_batch_dim else 3)

    # ---- neurons

    def get_neuron_results(
        self,
        layer: int,
        neuron_slice: SliceLike = None,
        pos_slice: SliceLike = None,
        project_output_onto: Optional[Tensor] = None,
    ) -> Tensor:
        """What each neuron of one layer wrote, `[batch, pos, neuron, d_model]`, biases apart.

        `project_output_onto`, `[d_model]` or `[d_model, k]`, projects each; the last axis then goes, or has length k
        (1 for one direction and a single neuron).
        """
        pos_slice, neuron_slice = _as_slice(pos_slice), _as_slice(neuron_slice)
        # positions first: an int drops that axis, and neurons stay the last one
        acts = neuron_slice.apply(pos_slice.apply(self[("post", layer, "mlp")], dim=-2), dim=-1)
        written = neuron_slice.apply(self.model.blocks[layer].mlp.W_out, dim=0)
        if project_output_onto is None:
            return acts[..., None] * written
        projected = written @ project_output_onto
        single = project_output_onto.ndim == projected.ndim == 1
        return acts * projected if single else acts[..., None] * projected

    def stack_neuron_results(
        self,
        layer: int,
        pos_slice: SliceLike = None,
        neuron_slice: SliceLike = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        project_output_onto: Optional[Tensor] = None,
    ) -> MaybeLabelled:
        """What each neuron before `layer` wrote, `[n_neurons, batch, pos, d_model]`, labels "L0N0". Large.

        With `project_output_onto` (see `get_neuron_results`) the `d_mlp x d_model` product is never built, also under
        `apply_ln`.
        """
        pos_slice, neuron_slice, layer = _as_slice(pos_slice), _as_slice(neuron_slice), self._up_to(layer)
        if neuron_slice.mode == "int":  # one neuron a layer is still a stack
            neuron_slice = Slice([neuron_slice.slice])
        neurons = neuron_slice.apply(torch.arange(self.model.cfg.d_mlp), dim=0).tolist()
        labels = [f"L{each}N{neuron}" for each in range(layer) for neuron in neurons]
        project, squeeze = _as_columns(project_output_onto)
        norm_first = apply_ln and project is not None
        stack = self._neuron_stack(layer, pos_slice, neuron_slice, norm_first, False, project)
        if incl_remainder:
            stream = self._finish(self._stream(layer, pos_slice)[None], layer, pos_slice, norm_first, False, project)
            stack = torch.cat([stack, stream - stack.sum(dim=0, keepdim=True)], dim=0)
            labels.append("remainder")
        if apply_ln and not norm_first:
            stack = self.apply_ln_to_stack(stack, layer, pos_slice=pos_slice)
        if squeeze:
            stack = stack.squeeze(-1)
        return (stack, labels) if return_labels else stack

    def _neuron_stack(
        self,
        layer: int,
        pos_slice: Slice,
        neuron_slice: Slice,
        norm_first: bool,
        mlp_input: bool,
        project: Tensor | None,
    ) -> Tensor:
        """Neurons of every layer before `layer`, `[n, ..., d_model]` or, projected by `[d_model, k]`, `[n, ..., k]`."""
        if layer == 0:
            return self._empty_stack(pos_slice, width=None if project is None else project.shape[-1])
        if norm_first and self._has_norms():
            scale = self._norm_scale(layer, mlp_input, pos_slice)
            options = (neuron_slice, pos_slice, project, scale)
            results = [self._normalized_neurons(each, *options) for each in range(layer)]
        else:
            results = [self.get_neuron_results(each, neuron_slice, pos_slice, project) for each in range(layer)]
        return torch.cat(results, dim=-2).movedim(-2, 0)

    def _normalized_neurons(
        self, layer: int, neuron_slice: Slice, pos_slice: Slice, project: Tensor, scale: Tensor
    ) -> Tensor:
        """`norm(a w) p = (a / scale) (w - mean(w)) p` of each neuron, so weight rows are projected first."""
        written = neuron_slice.apply(self.model.blocks[layer].mlp.W_out, dim=0)
        acts = neuron_slice.apply(pos_slice.apply(self[("post", layer, "mlp")], dim=-2), dim=-1)
        projected = written @ project
        if self.model.cfg.normalization_type in CENTRED_NORMS:
            projected = projected - written.mean(dim=-1, keepdim=True) * project.sum(dim=0)
        return (acts / scale)[..., None] * projected

    # ---- everything at once

    def get_full_resid_decomposition(
        self,
        layer: Optional[int] = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: SliceLike = None,
        return_labels: bool = False,
        project_output_onto: Optional[Tensor] = None,
    ) -> MaybeLabelled:
        """The stream at the input of `layer` as heads, neurons or MLPs, embeddings, bias: `[n, batch, pos, d_model]`.

        They come in that order and sum to the stream where no post-norm stands between a component and it.
        `project_output_onto`: `[d_model]` or `[d_model, k]`, applied to each component after the norm.
        """
        pos_slice, layer = _as_slice(pos_slice), self._up_to(layer)
        has_mlps = not self.model.cfg.attn_only
        project, squeeze = _as_columns(project_output_onto)
        norm_first = apply_ln and project is not None

        def finish(stack: Tensor) -> Tensor:
            return self._finish(stack, layer, pos_slice, norm_first, mlp_input, project)

        heads, labels = self.stack_head_results(layer + mlp_input, pos_slice=pos_slice, return_labels=True)
        parts = [finish(heads)]
        if has_mlps and layer > 0 and expand_neurons:
            parts.append(self._neuron_stack(layer, pos_slice, Slice(), norm_first, mlp_input, project))
            labels += [f"L{each}N{neuron}" for each in range(layer) for neuron in range(self.model.cfg.d_mlp)]
        elif has_mlps and layer > 0:
            mlps, mlp_labels = self.decompose_resid(
                layer, mode="mlp", pos_slice=pos_slice, incl_embeds=False, return_labels=True
            )
            parts.append(finish(mlps))
            labels += mlp_labels
        for name, label in self._embeddings():
            parts.append(finish(pos_slice.apply(self[name], dim=-2)[None]))
            labels.append(label)
        # MLP biases are inside mlp_out already, unless neurons stand in for it
        bias = self.model.accumulated_bias(layer, mlp_input, include_mlp_biases=expand_neurons and has_mlps)
        parts.append(finish(bias.expand(1, *heads.shape[1:])))
        labels.append("bias")
        stack = torch.cat(parts, dim=0)
        if apply_ln and not norm_first:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input=mlp_input, pos_slice=pos_slice)
        if squeeze:
            stack = stack.squeeze(-1)
        return (stack, labels) if return_labels else stack

    # ---- norms and logits

    def apply_ln_to_stack(
        self,
        residual_stack: Tensor,
        layer: Optional[int] = None,
        mlp_input: bool = False,
        pos_slice: SliceLike = None,
        batch_slice: SliceLike = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Tensor:
        """Scale `[n, batch, pos, d_model]` as the norm before `layer` scaled the whole stream; LayerNorms also centre.

        None and -1 mean the final norm, `mlp_input` the one before the MLP. `pos_slice` is applied to the cached scale
        only (the stack has it already), `batch_slice` to both. With `recompute_ln` at the final norm each entry goes
        through `model.ln_final` with statistics of its own.
        """
        if not self._has_norms():
            return residual_stack
        pos_slice, batch_slice = _as_slice(pos_slice), _as_slice(batch_slice)
        layer = self.model.cfg.n_layers if layer in (None, -1) else layer
        if has_batch_dim:
            residual_stack = batch_slice.apply(residual_stack, dim=1)
        if recompute_ln and layer == self.model.cfg.n_layers and hasattr(self.model, "ln_final"):
            return torch.stack([self._final_norm(stream, has_batch_dim) for stream in residual_stack], dim=0)
        if self.model.cfg.normalization_type in CENTRED_NORMS:
            residual_stack = residual_stack - residual_stack.mean(dim=-1, keepdim=True)
        scale = self._norm_scale(layer, mlp_input, pos_slice)
        return residual_stack / (batch_slice.apply(scale, dim=0) if self.has_batch_dim else scale)

    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: Union[str, int, Tensor],
        incorrect_tokens: Optional[Union[str, int, Tensor]] = None,
        pos_slice: SliceLike = None,
        batch_slice: SliceLike = None,
        has_batch_dim: bool = True,
    ) -> Tensor:
        """What each entry of `[n, batch, pos, d_model]` adds to a token's logit, `[n, batch, pos]`, b_U apart.

        Each entry goes through the final norm's cached scale, then onto the token's unembedding direction. With
        `incorrect_tokens`, of the same shape, onto the difference of the two directions.
        """
        directions = self.model.tokens_to_residual_directions(tokens)
        if incorrect_tokens is not None:
            shapes = [() if isinstance(each, (str, int)) else tuple(each.shape) for each in (tokens, incorrect_tokens)]
            if shapes[0] != shapes[1]:
                raise BadInput(f"tokens {shapes[0]} and incorrect_tokens {shapes[1]} must have the same shape")
            directions = directions - self.model.tokens_to_residual_directions(incorrect_tokens)
        scaled = self.apply_ln_to_stack(
            residual_stack, layer=-1, pos_slice=pos_slice, batch_slice=batch_slice, has_batch_dim=has_batch_dim
        )
        return (scaled * directions).sum(dim=-1)

    def _has_norms(self) -> bool:
        return self.model.cfg.normalization_type in NORMS

    def _finish(
        self, stack: Tensor, layer: int, pos_slice: Slice, norm_first: bool, mlp_input: bool, project: Tensor | None
    ) -> Tensor:
        if norm_first:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input=mlp_input, pos_slice=pos_slice)
        return stack if project is None else stack @ project

    def _norm_scale(self, layer: int, mlp_input: bool, pos_slice: Slice) -> Tensor:
        """The cached scale of the norm before `layer`, `[batch, pos, 1]`."""
        final = layer == self.model.cfg.n_layers
        name = "ln_final.hook_scale" if final else f"blocks.{layer}.ln{2 if mlp_input else 1}.hook_scale"
        return pos_slice.apply(self[name], dim=-2)

    def _final_norm(self, stream: Tensor, has_batch_dim: bool) -> Tensor:
        # ln_final takes [batch, pos, d_model], whatever axes slices have taken away
        full = stream if has_batch_dim else stream[None]
        return self.model.ln_final(full if full.ndim > 2 else full[:, None]).reshape(stream.shape)

    # ---- recurrent mixers

    def ssm_layers(self, mixer_type: Optional[Union[type, tuple[type, ...]]] = None) -> list[int]:
        """The blocks with a recurrent mixer: none, since every block here holds attention."""
        return []

    def compute_ssm_effective_attention(
        self, layer: Optional[int] = None, include_dt_scaling: bool = False, per_state_coord: bool = False
    ) -> Tensor:
        raise NoRecurrentMixer("no block of this model has a recurrent mixer, so there is no effective attention")

    def compute_ssm_state(self, layer: Optional[int] = None, time_step: Optional[int] = None) -> Tensor:
        raise NoRecurrentMixer("no block of this model has a recurrent mixer, so there is no recurrent state")

    # ---- shared

    def _up_to(self, layer: int | None) -> int:
        if layer is None or layer == -1:
            return self.model.cfg.n_layers
        if layer < 0:
            raise BadInput(f"layer must be 0 to n_layers, or -1 or None for all layers, not {layer}")
        return layer

    def _embeddings(self) -> list[tuple[str, str]]:
        return [("hook_embed", "embed")] * self.has_embed + [("hook_pos_embed", "pos_embed")] * self.has_pos_embed

    def _stream(self, layer: int, pos_slice: Slice) -> Tensor:
        """The stream at the input of `layer`, `[batch, pos, d_model]`."""
        return pos_slice.apply(self[("resid_post", layer - 1) if layer > 0 else ("resid_pre", 0)], dim=-2)

    def _empty_stack(self, pos_slice: Slice, width: int | None = None) -> Tensor:
        embed = pos_slice.apply(self["hook_embed"], dim=-2)
        return torch.zeros(0, *embed.shape[:-1], width or embed.shape[-1], device=embed.device)


def _as_slice(given: SliceLike) -> Slice:
    return given if isinstance(given, Slice) else Slice(given)


def _as_columns(project: Tensor | None) -> tuple[Tensor | None, bool]:
    """A projection as `[d_model, k]`, and whether it came as a single direction."""
    single = project is not None and project.ndim == 1
    return (project[:, None] if single else project), single


def _can_be_pickled(model: Any) -> bool:
    """Whether pickle can walk the model. Tensors are passed over, so this copies no weights."""

    class Walk(pickle.Pickler):
        def persistent_id(self, thing: Any) -> str | None:
            return "tensor" if isinstance(thing, Tensor) else None

    try:
        Walk(io.BytesIO(), protocol=2).dump(model)
    except Exception:
        return False
    return True
