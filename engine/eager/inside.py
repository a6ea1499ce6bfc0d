"""Taps on values that exist only inside a module's forward, reached by watching the torch functions that it calls.

Most families call one attention function that can be exchanged (attention.py). The others have attention code of their own,
and a router's softmax is nobody's module: there, for as long as a tap needs it, the module's forward runs under a mode that
sees each torch call, takes the operands of the ones it knows, and lets the forward go on with what the taps make of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.attention import explicit_attention

if TYPE_CHECKING:
    from engine.eager.run import Run, State

PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")
LINEARS = ("linear",)
# attention with linear biases -> what it calls a head's slope times the position of a key
BIASES = {"BloomAttention": "alibi", "MptAttention": "position_bias"}


class _Inside(TorchFunctionMode):
    """Hands each torch call of a forward to the method that is named for it, if there is one."""

    def __init__(self, run: Run, state: State, arguments: dict[str, Any]) -> None:
        """arguments: the keywords that the module was called with."""
        super().__init__()
        self.run, self.state, self.arguments = run, state, arguments

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(function, "__name__", "")
        known = "product" if name in PRODUCTS else "linear" if name in LINEARS else name
        handler = getattr(self, f"on_{known}", None)
        if handler is None or self.run.firing:
            return function(*args, **(kwargs or {}))
        return handler(function, *args, **(kwargs or {}))

    def fire(self, point: str, value: Tensor) -> Tensor:
        return self.run.fire(point, self.state, value)


class InsideAttention(_Inside):
    """The first matrix product is of queries and keys; the softmax turns scores into the pattern."""

    _multiplied = False

    def on_product(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        names = ("batch1", "batch2")
        pair = (kwargs[names[0]], kwargs[names[1]]) if names[0] in kwargs else args[-2:]
        if self._multiplied or pair[1].dim() < 3:  # a product with a matrix is a projection
            return function(*args, **kwargs)
        self._multiplied = True
        pair = self._query_and_key(*pair)
        if names[0] in kwargs:
            return function(*args, **(kwargs | dict(zip(names, pair))))
        return function(*args[:-2], *pair, **kwargs)

    def _query_and_key(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """q `[b, H, q, dh]` and k `[b, K, dh, k]`, or both with batch and heads in one axis."""
        batch = self.run.batch_size
        q = query.unflatten(0, (batch, -1)) if query.dim() == 3 else query
        k = key.unflatten(0, (batch, -1)) if key.dim() == 3 else key
        q = self.fire("q_rot", q.transpose(1, 2)).transpose(1, 2)
        k = self.fire("k_rot", k.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return q.reshape(query.shape), k.reshape(key.shape)

    def on_softmax(self, function: Callable, scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        masked = scores.masked_fill(scores <= torch.finfo(scores.dtype).min / 2, -torch.inf)
        by_head = masked.unflatten(0, (self.run.batch_size, -1)) if masked.dim() == 3 else masked
        pattern = function(self.fire("attn_scores", by_head - self._bias_of_query(by_head)), *args, **kwargs)
        return self.fire("attn_probs", pattern.nan_to_num()).reshape(scores.shape)

    def _bias_of_query(self, scores: Tensor) -> Tensor | float:
        """With linear biases a score falls with the distance to the query, so that of a query on itself has none.

        The model adds slope * key instead, which differs by a constant a row, and that a softmax does not see.
        """
        bias = self.arguments.get(BIASES.get(type(self.state.layer.inner).__name__))
        if bias is None:
            return 0.0
        of_key = bias.unflatten(0, (-1, scores.shape[1]))[..., -scores.shape[-1] :]  # [b or 1, H, 1, k]
        return of_key[..., -scores.shape[-2] :].transpose(-2, -1)

    def on_scaled_dot_product_attention(
        self, function: Callable, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if attn_mask is None and not kwargs.get("is_causal"):
            attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        scaling = kwargs.get("scale") or q.shape[-1] ** -0.5
        z, _ = explicit_attention(q, k, v, mask=attn_mask, scaling=scaling, fire=self.fire)
        return z.transpose(1, 2)


class InsideRouter(_Inside):
    """The linear gives logits, one row a token; a softmax over all experts gives probabilities."""

    def on_linear(self, function: Callable, *args: Any, **kwargs: Any) -> Tensor:
        return self._fire_rows("router_logits", function(*args, **kwargs))

    def on_softmax(self, function: Callable, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._fire_rows("router_probs", function(logits, *args, **kwargs))

    def _fire_rows(self, point: str, rows: Tensor) -> Tensor:
        if rows.dim() == 3:
            return self.fire(point, rows)
        return self.fire(point, rows.unflatten(0, (self.run.batch_size, -1))).flatten(0, 1)


# point -> (role of the module whose forward is watched, the mode that watches it)
WATCHED: dict[str, tuple[str, type[_Inside]]] = {
    "q_rot": ("inner", InsideAttention),
    "k_rot": ("inner", InsideAttention),
    "attn_scores": ("inner", InsideAttention),
    "attn_probs": ("inner", InsideAttention),
    "router_logits": ("router", InsideRouter),
    "router_probs": ("router", InsideRouter),
}
