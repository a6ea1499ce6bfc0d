"""The weights a program sees under TransformerLens' names: processed, computed on first use, and never lost when edited.

A weight handed out is a tensor of its own. Before each forward the ones handed out are compared with their checksums; on the
first edit the processed weights are written into the model (as TransformerLens does at load), and the edit with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.checksum import checksum
from engine.errors import Refused
from engine.processed import Processed


class Weight:
    """A weight of a tree module as an attribute: `block.attn.W_Q`. `repeat` shows K heads as H, as grouped attention does."""

    def __init__(self, name: str, *, repeat: bool = False) -> None:
        self.name, self.repeat = name, repeat

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        value = module.parameters_of_model.get(self.name, module.layer_index)
        return module.parameters_of_model.processed.per_query_head(value) if self.repeat else value

    def __set__(self, module: Any, value: Tensor) -> None:
        if self.repeat and module.cfg.n_key_value_heads not in (None, module.cfg.n_heads):
            raise AttributeError(f"this weight is a repeated copy of the key/value heads'; set _{'W' if value.dim() == 3 else 'b'}_K or _V")
        module.parameters_of_model.set(self.name, module.layer_index, value)


@dataclass
class _HandedOut:
    tensor: Tensor
    sum: tuple[int, int] | None  # None: set by the user and not yet in the model


class ModelParameters:
    """Hands out processed weights by canonical name and layer, and carries edits of them into the model."""

    def __init__(self, processed: Processed) -> None:
        self.processed = processed
        self._out: dict[tuple[str, int | None], _HandedOut] = {}

    def get(self, name: str, layer: int | None = None) -> Tensor:
        """The processed weight, the same tensor at each call, so that an edit in place can be seen."""
        key = (name, layer)
        if key not in self._out:
            value = self.processed.weight(name, layer).detach().clone()
            self._out[key] = _HandedOut(value, checksum(value))
        return self._out[key].tensor

    def peek(self, name: str, layer: int | None = None) -> Tensor:
        """The processed weight to compute with, not kept."""
        key = (name, layer)
        return self._out[key].tensor if key in self._out else self.processed.weight(name, layer).detach()

    def set(self, name: str, layer: int | None, value: Tensor) -> None:
        """Replaces a weight. Raises ValueError for another shape."""
        old = self.peek(name, layer)
        if old.shape != value.shape:
            raise ValueError(f"{name} is {list(old.shape)}, not {list(value.shape)}")
        self._out[name, layer] = _HandedOut(value.detach().to(old), None)

    def carry_edits(self) -> None:
        """Writes edited weights into the model; called before each forward."""
        edited = {key: out for key, out in self._out.items() if out.sum is None or checksum(out.tensor) != out.sum}
        if not edited:
            return
        try:
            self.processed.write({key: out.tensor for key, out in edited.items()})
        except Refused:  # said once; the model goes on with the weights it has
            for key in edited:
                del self._out[key]
            raise
        for out in edited.values():
            out.sum = checksum(out.tensor)

    def forget(self) -> None:
        """Drops what was handed out, after the model was moved or cast."""
        self.carry_edits()
        self._out.clear()


class WeightModule(nn.Module):
    """A tree module with weights that are attributes, not parameters of its own."""

    def __init__(self, parameters_of_model: ModelParameters, cfg: Any, layer_index: int | None = None) -> None:
        super().__init__()
        self.cfg, self.layer_index = cfg, layer_index
        object.__setattr__(self, "parameters_of_model", parameters_of_model)

    def __setattr__(self, name: str, value: Any) -> None:
        weight = getattr(type(self), name, None)
        if isinstance(weight, Weight):
            weight.__set__(self, torch.as_tensor(value))
        else:
            super().__setattr__(name, value)
