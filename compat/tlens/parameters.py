"""The weights a program sees under TransformerLens' names: processed, computed on first use, never lost when edited.

A weight handed out is a tensor of its own. Before each forward the ones handed out are compared with their checksums;
on the first edit the processed weights are written into the model (as TransformerLens does at load), and the edit with
them. The other way round, a weight handed out follows what others do to the raw parameters: an optimiser's step shows
the next time the model is asked for a weight or a forward, an edit through a raw parameter's `.data` at the next
forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.checksum import checksum
from engine.errors import BadInput, Refused
from engine.processed import Processed


class Weight:
    """A weight of a tree module as an attribute: `block.attn.W_Q`. `repeat` shows K heads as H (grouped attention)."""

    def __init__(self, name: str, *, repeat: bool = False) -> None:
        self.name, self.repeat = name, repeat

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        value = module.parameters_of_model.get(self.name, module.layer_index)
        return module.parameters_of_model.processed.per_query_head(value) if self.repeat else value

    def __set__(self, module: Any, value: Tensor) -> None:
        if self.repeat and module.cfg.n_key_value_heads not in (None, module.cfg.n_heads):
            raise AttributeError(
                "this weight is a repeated copy of the key/value heads'; "
                f"set _{'W' if value.dim() == 3 else 'b'}_K or _V"
            )
        module.parameters_of_model.set(self.name, module.layer_index, value)


@dataclass
class _HandedOut:
    tensor: Tensor
    sum: tuple[int, int] | None  # None: set by the user and not yet in the model
    trace: int = 0  # of the raw weight it was computed from

    @property
    def edited(self) -> bool:
        return self.sum is None or checksum(self.tensor) != self.sum


class ModelParameters:
    """Hands out processed weights by canonical name and layer, and carries edits of them into the model."""

    def __init__(self, processed: Processed, listed_in: dict[str, nn.Parameter]) -> None:
        """listed_in: where the raw parameters are kept listed under their Hugging Face names, which have dots."""
        self.processed = processed
        self.raw: dict[str, nn.Parameter] = {}
        self._listed_in = listed_in
        self.lent = False  # whether somebody asked for the raw parameters, and may change them through `.data`
        self._out: dict[tuple[str, int | None], _HandedOut] = {}
        self._find_raw()
        self._seen = self._stamp()
        self._forwards = 0  # under way
        self._taken: set[tuple[str, int | None]] = set()  # what was handed out meanwhile

    def get(self, name: str, layer: int | None = None) -> Tensor:
        """The processed weight, the same tensor at each call, so that an edit in place can be seen."""
        self._follow_raw()
        key = (name, layer)
        if key not in self._out:
            value = self._compute_copy(key)
            self._out[key] = _HandedOut(value, checksum(value), self._trace(key))
        if self._forwards:
            self._taken.add(key)
        return self._out[key].tensor

    def peek(self, name: str, layer: int | None = None) -> Tensor:
        """The processed weight to compute with, not kept."""
        self._follow_raw()
        key = (name, layer)
        return self._out[key].tensor if key in self._out else self._compute(key)

    def set(self, name: str, layer: int | None, value: Tensor) -> None:
        """Replaces a weight. Raises BadInput (a ValueError) for another shape."""
        self._follow_raw()
        there = self._compute((name, layer))
        if there.shape != value.shape:
            raise BadInput(f"{name} is {list(there.shape)}, not {list(value.shape)}")
        value = value.detach().to(there)
        edit_sum = checksum(value) if torch.equal(value, there) else None
        self._out[name, layer] = _HandedOut(value, edit_sum, self._trace((name, layer)))
        if self._forwards:
            self._taken.add((name, layer))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around each forward: edits made before it take effect; one made inside comes too late and is refused."""
        self.carry_edits()
        self._forwards += 1
        try:
            yield
            self._refuse_edits(self._taken)
        finally:
            self._forwards -= 1
            self._taken = self._taken if self._forwards else set()

    def _refuse_edits(self, keys: Iterable[tuple[str, int | None]]) -> None:
        edited = [key for key in keys if self._out[key].edited]
        if edited:
            self._compute_again()
            raise Refused(
                f"{edited[0][0]} was edited while a forward was under way, which had read the weights already; the "
                "edit was dropped. Edit weights before the forward, or what they compute with a hook"
            )

    def carry_edits(self) -> None:
        """Writes edited weights into the model; called before each forward."""
        self._follow_raw(thorough=True)
        edited = {key: out for key, out in self._out.items() if out.edited}
        if not edited:
            return
        if self._forwards:
            self._refuse_edits(edited)
        before = set(map(id, self.raw.values()))
        try:
            self._refuse_gated_bias(edited)
            self.processed.write({key: out.tensor for key, out in edited.items()})
        except Refused:
            self._compute_again()
            raise
        for key, out in self._out.items():
            out.sum, out.trace = checksum(out.tensor), self._trace(key)
        self._find_raw()
        self._seen = self._stamp()
        if self.lent and not before.issuperset(map(id, self.raw.values())):
            logging.warning(
                "the first edit of a weight gave the model new parameters; an optimizer made before it does not know "
                "them, so make it from model.parameters() again"
            )

    def _refuse_gated_bias(self, edited: dict[tuple[str, int | None], _HandedOut]) -> None:
        for key, out in edited.items():
            gated = key[0] == "mlp_in_bias" and self.processed.engine.facts.gated_mlp
            if gated and not torch.equal(out.tensor, self._compute(key)):
                raise Refused(
                    "b_in of a gated MLP is added after the gate, where the model has no bias; "
                    "add it in a hook on mlp.hook_post"
                )

    def moved(self) -> None:
        """Brings what was handed out to the model's device and dtype; call `carry_edits` before the model moves."""
        self._find_raw()
        self._compute_again()

    def _compute_again(self) -> None:
        """Gives what was handed out the numbers that the model has."""
        self.processed.forget()
        self._seen = self._stamp()
        for key, out in self._out.items():
            out.tensor.data = self._compute_copy(key)
            out.sum, out.trace = checksum(out.tensor), self._trace(key)

    def lend(self) -> None:
        """From now on expect that raw parameters are changed through `.data`, which leaves no other trace."""
        if not self.lent:
            self.lent = True
            for key, out in self._out.items():
                out.trace = self._trace(key)

    def _find_raw(self) -> None:
        for name in self.raw:
            del self._listed_in[name]
        self.raw = dict(self.processed.engine.model.named_parameters())
        self._listed_in.update(self.raw)

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        """What changes with a raw parameter: who it is, its version, where its data lies."""
        return tuple((id(p), p._version, p.data_ptr()) for p in self.raw.values())

    def _trace(self, key: tuple[str, int | None]) -> int:
        """A sum over a raw weight's bits, which an edit through `.data` changes; 0 while nobody asked for weights."""
        if not self.lent:
            return 0
        raw = self.processed.engine.weights(*key).detach()
        return int(raw.view(_BITS[raw.element_size()]).sum(dtype=torch.int64))

    def _compute(self, key: tuple[str, int | None]) -> Tensor:
        return self.processed.weight(*key).detach()

    def _compute_copy(self, key: tuple[str, int | None]) -> Tensor:
        with torch.inference_mode(False):  # what is handed out in a `generate` serves a later backward too
            return self._compute(key).clone()

    def _follow_raw(self, thorough: bool = False) -> None:
        """Computes what was handed out again if a raw parameter has changed. Raises `BadInput` if both were edited."""
        thorough = thorough and self.lent
        if thorough:
            self._find_raw()
        if self._stamp() == self._seen and not (
            thorough and any(self._trace(key) != out.trace for key, out in self._out.items())
        ):
            return
        lost = [name for (name, _), out in self._out.items() if out.edited]
        self._compute_again()
        if lost:
            raise BadInput(
                f"{', '.join(lost)} and the parameters underneath were both changed since the last forward, so the "
                "edit was dropped: take the weight from the model after an optimizer's step, then edit it"
            )


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NoParametersApart:
    """A part of the tree without parameters of its own: several weights may lie in one Hugging Face parameter."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        raise Refused(
            f"{type(self).__name__} has no parameters of its own; model.named_parameters() has all of them, under "
            "their Hugging Face names, and the weights themselves are attributes such as W_Q"
        )


class Blocks(NoParametersApart, nn.ModuleList):
    """The blocks of a model, in order."""


class WeightModule(NoParametersApart, nn.Module):
    """A tree module with weights that are attributes, not parameters of its own."""

    buffers_elsewhere: tuple[
        str, ...
    ] = ()  # names that TransformerLens saves beside the weights, and that hold nothing learned

    def __init__(self, parameters_of_model: ModelParameters, cfg: Any, layer_index: int | None = None) -> None:
        super().__init__()
        self.cfg, self.layer_index = cfg, layer_index
        object.__setattr__(self, "parameters_of_model", parameters_of_model)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return (
            super().named_parameters(*args, **kwargs)
            if self.weights()
            else nn.Module.named_parameters(self, *args, **kwargs)
        )

    def weights(self) -> dict[str, str]:
        """TransformerLens' names of the weights here -> canonical names."""
        attributes = {name: value for owner in reversed(type(self).__mro__) for name, value in vars(owner).items()}
        return {
            name: weight.name
            for name, weight in attributes.items()
            if isinstance(weight, Weight) and not weight.repeat and self._has(weight.name)
        }

    def _has(self, name: str) -> bool:
        """Whether the layer has the matrix that a name speaks of; a bias that it lacks is zeros."""
        return self.parameters_of_model.processed.engine.weights.has(name.removesuffix("_bias"), self.layer_index)

    def __setattr__(self, name: str, value: Any) -> None:
        weight = getattr(type(self), name, None)
        if isinstance(weight, Weight):
            weight.__set__(self, torch.as_tensor(value))
        elif isinstance(weight, property):  # nn.Module would put a module beside it, unseen
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for attribute, name in self.weights().items():
            destination[prefix + attribute] = self.parameters_of_model.peek(name, self.layer_index).clone()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list,
        unexpected: list,
        errors: list,
    ) -> None:
        weights = self.weights()
        for attribute, name in weights.items():
            if prefix + attribute not in state_dict:
                missing.append(prefix + attribute)
                continue
            try:
                self.parameters_of_model.set(name, self.layer_index, state_dict[prefix + attribute])
            except BadInput as error:
                errors.append(f"{prefix}{attribute}: {error}")
        known = (*weights, *self.buffers_elsewhere, *self._modules)
        found = [key for key in state_dict if key.startswith(prefix) and key[len(prefix) :].split(".")[0] not in known]
        unexpected += found if strict else []
