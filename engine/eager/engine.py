"""The eager engine: a Hugging Face causal model as it is, with taps on its modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from engine.eager.absent import why_absent
from engine.eager.attention import take_over
from engine.eager.facts import read_facts
from engine.eager.resolve import Tree, learn_head_axis, resolve
from engine.eager.run import BEFORE_LAYERS, Run, current_run
from engine.eager.selfcheck import self_check
from engine.eager.weights import EagerWeights, untie
from engine.errors import BadInput, CompatError, Refused
from engine.points import Address
from engine.seam import Batch, Facts, Mode
from engine.taps import Tap, Taps


class _Enough(BaseException):
    """Ends a forward early; not an Exception, so that nothing in the model catches it."""

    def __init__(self, residual: Tensor | None) -> None:
        self.residual = residual


class EagerEngine:
    """Runs a causal language model of transformers with taps. See `engine.seam.Engine` for the contract."""

    def __init__(self, model: nn.Module, tokenizer: Any = None, *, model_id: str = "", owned: bool = True) -> None:
        """Takes over `model` (also PEFT-wrapped). Raises `LoadFailed` if its parts cannot be resolved and proved.

        owned: whether the weights may be changed in place; a model that somebody else loaded is copied first.
        """
        self.tokenizer, self._owned = tokenizer, owned
        self._model_id = model_id
        self._unproved: dict[str, str] = {}
        self.weights = EagerWeights(self._current_tree, self._prepare_writing, self._refuses_here)
        self._adopt(model)
        self._proving = True
        self._unproved = self_check(self)
        self._proving = False

    def _adopt(self, model: nn.Module) -> None:
        self.model = model
        self._causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        exchanged = take_over(self._causal)
        self._causal.eval()
        config = self._causal.config.get_text_config()
        self.tree: Tree = resolve(self._causal, config)
        self.tree.exchanged = exchanged
        learn_head_axis(self.tree, self.tree.embed.weight.device)
        self._facts = read_facts(self.tree, config, self._model_id or getattr(config, "_name_or_path", ""))

    def _current_tree(self) -> Tree:  # a method, and no lambda: a copy of the engine must read its own tree
        return self.tree

    def _refuses_here(self, address: Address, mode: Mode) -> str | None:
        return self.refuses(address, mode)

    def _prepare_writing(self) -> None:
        if any(hasattr(module, "base_layer") for module in self._causal.modules()):
            raise Refused("a weight of a model with an adapter was edited; merge the adapter first (merge_and_unload())")
        if not self._owned:
            self._owned = True
            self._adopt(copy.deepcopy(self.model))
        untie(self.tree)

    @property
    def facts(self) -> Facts:
        return self._facts

    def refresh_facts(self) -> None:
        """Reads the facts again, after the model was moved or cast."""
        self._facts = read_facts(self.tree, self._causal.config.get_text_config(), self._facts.model_id)

    def run(
        self,
        batch: Batch,
        taps: Iterable[Tap] | Taps,
        *,
        start: tuple[int, Tensor] | None = None,
        stop: int | None = None,
        cache: Any = None,
        grad: bool = False,
        unembed: bool = True,
        last_only: bool = False,
    ) -> Tensor | None:
        """One forward; see `Engine.run`. `last_only` computes the logits of the last position only, `[batch, 1, d_vocab]`."""
        taps = taps if isinstance(taps, Taps) else Taps(taps)
        first, last = 0 if start is None else start[0], self.facts.n_layers if stop is None else stop
        if not 0 <= first <= last <= self.facts.n_layers:
            raise BadInput(f"start = {first} and stop = {last} must be in order, from 0 to {self.facts.n_layers}")
        _check_form(batch)
        run = Run(self.tree, self.weights, taps, self._check_served, grad=grad, batch_size=batch.shape[0])
        with torch.set_grad_enabled(grad), run, _passing_through(self.tree, first, run):
            if start is not None:
                run.on_input(self._entered_at(first), lambda _: start[1])
            if stop is not None:
                run.on_input(self._entered_at(stop), _end_with_input)
            elif not unembed:
                run.on_input(self.tree.lm_head, _end)
            run.arm_all(None if start is None else first)
            batch = batch if start is not None else _entering(run, batch, self.facts.device)
            inputs = self._inputs(batch, cache, start)
            if cache is not None:
                _check_cache(cache, first, last)
            if last_only:
                inputs["logits_to_keep"] = 1
            try:
                logits = self.model(**inputs).logits
            except _Enough as end:
                logits = end.residual
            else:
                logits = run.fire("logits", run.outside, logits)
        self._check_all_fired(taps, start, stop, unembed)
        return logits

    def generate(
        self, batch: Batch, taps: Callable[[int], Iterable[Tap]], sample: Callable[[Tensor], Tensor | None]
    ) -> Iterator[Tensor]:
        """The prompt, then one step a token; see `Engine.generate`."""
        cache, step = self.new_cache(), 0
        while True:
            live = Taps(taps(step))
            whole = any(address.point in ("lm_head", "logits") for address in live.addresses())
            logits = self.run(batch, live, cache=cache, last_only=not whole)
            ids = sample(logits[:, -1])
            if ids is None:
                return
            yield ids
            mask = None if batch.mask is None else torch.nn.functional.pad(batch.mask, (0, 1), value=1)
            batch, step = Batch(ids[:, None], mask), step + 1

    def new_cache(self) -> DynamicCache:
        """A key/value cache that keeps every position, also on sliding-window layers, so that keys and patterns show whole."""
        return DynamicCache()

    def refuses(self, address: Address, mode: Mode) -> str | None:
        """None, or why the address cannot be served, as a sentence."""
        if address.layer is not None and not 0 <= address.layer < self.facts.n_layers:
            return f"the model has layers 0 to {self.facts.n_layers - 1}"
        if address.point == "tokens" and mode == "grad":
            return "token ids are whole numbers, which have no gradient"
        if address.point in self._unproved:
            return self._unproved[address.point]
        return why_absent(self.tree, self.facts, address)

    def close(self) -> None:
        """Nothing to release: the model belongs to its owner."""

    def _check_served(self, address: Address) -> None:
        reason = self.refuses(address, "read")
        if reason is not None:
            raise Refused(f"{address} cannot be served on {self.facts.architecture} (eager engine): {reason}")

    def _inputs(self, batch: Batch, cache: Any, start: tuple[int, Tensor] | None) -> dict[str, Any]:
        (n, new), mask, past = batch.shape, batch.mask, 0 if cache is None else cache.get_seq_length()
        if past + new > self.facts.n_ctx and self.facts.positions == "learned":
            raise BadInput(
                f"the prompt has {past + new} positions, but {self.facts.model_id} has a context of n_ctx = {self.facts.n_ctx}"
            )
        inputs: dict[str, Any] = {"use_cache": cache is not None}
        if start is not None:
            inputs["inputs_embeds"] = torch.zeros_like(start[1]).to(self.facts.device)
        elif batch.embeds is not None:
            inputs["inputs_embeds"] = batch.embeds.to(self.facts.device)
        else:
            inputs["input_ids"] = batch.tokens.to(self.facts.device)
            _check_ids(batch.tokens, self.facts.d_vocab)
        if mask is not None:
            if mask.shape != (n, past + new):
                raise BadInput(f"the attention mask is {list(mask.shape)}; {past} cached and {new} new positions need "
                               f"{[n, past + new]}")
            mask = mask.to(self.facts.device)
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
            inputs |= {"attention_mask": mask, "position_ids": positions}
        if cache is not None:
            inputs["past_key_values"] = cache
        return inputs

    def _entered_at(self, layer: int) -> nn.Module:
        """The module that the residual entering `layer` goes into; after the last layer, the final norm."""
        return self.tree.final_norm.module if layer == self.facts.n_layers else self.tree.layers[layer].block

    def _check_all_fired(self, taps: Taps, start: tuple[int, Tensor] | None, stop: int | None, unembed: bool) -> None:
        """A tap that the forward went past without firing would be a lost edit or a short capture."""
        first, last = 0 if start is None else start[0], self.facts.n_layers if stop is None else stop
        for address in taps.unfired():
            if address.layer is not None:
                due = first <= address.layer < last
            elif address.point in BEFORE_LAYERS:
                due = start is None
            else:
                due = stop is None and (unembed or address.point not in ("lm_head", "logits"))
            if due and not self._proving:  # the self-check finds out what a family does not go through
                raise CompatError(f"the tap at {address} never fired: the forward had passed it, or did not go through it")


def _entering(run: Run, batch: Batch, device: torch.device) -> Batch:
    """The batch that the model is called on: taps on what comes in see it, and never edit the caller's own tensor."""
    name, point = ("tokens", "tokens") if batch.embeds is None else ("embeds", "embeddings")
    return replace(batch, **{name: run.fire_copy(point, run.outside, getattr(batch, name).to(device))[0]})


def _check_cache(cache: Any, first: int, last: int) -> None:
    """Layers that hold different numbers of positions would attend to some of the past only, and say nothing."""
    past = cache.get_seq_length()
    held = [layer.get_seq_length() for layer in cache.layers[first:last]]
    if set(held + [0] * (last - first - len(held))) - {past}:
        raise BadInput(
            f"the cache holds {past} positions in layer 0, but {held} in layers {first} to {last - 1}: an earlier run with "
            "start or stop left it incomplete"
        )


def _check_form(batch: Batch) -> None:
    due, given = "tokens [batch, pos] (whole numbers)", batch.tokens
    if batch.embeds is not None:
        due, given = "embeds [batch, pos, d_model] (floats)", batch.embeds
    if given is None or given.dim() != due.count(",") + 1 or given.is_floating_point() != (given is batch.embeds):
        raise BadInput(f"a batch has {due}; got {'none' if given is None else f'{list(given.shape)} {given.dtype}'}")


def _check_ids(tokens: Tensor, d_vocab: int) -> None:
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < d_vocab:
        raise BadInput(f"token ids run from {int(tokens.min())} to {int(tokens.max())}; the vocabulary has {d_vocab} entries")


def _end(_: Tensor) -> None:
    raise _Enough(None)


def _end_with_input(x: Tensor) -> None:
    raise _Enough(x)


class _passing_through:
    """Lets the hidden states of one run pass the first `n` blocks untouched; a model call inside its taps is as ever."""

    def __init__(self, tree: Tree, n: int, run: Run) -> None:
        self._layers, self._run = tree.layers[:n], run
        self._blocks = [layer.block for layer in self._layers]

    def __enter__(self) -> None:
        self._before = [vars(block).get("forward") for block in self._blocks]
        for layer in self._layers:
            layer.block.forward = self._passing(layer.block.forward, layer.gives_tuple)

    def _passing(self, forward: Callable[..., Any], gives_tuple: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if current_run() is not self._run:
                return forward(*args, **kwargs)
            hidden_states = args[0] if args else kwargs["hidden_states"]
            return (hidden_states, None) if gives_tuple else hidden_states

        return call

    def __exit__(self, *_: object) -> None:
        for block, before in zip(self._blocks, self._before):
            if before is None:
                del block.forward
            else:
                block.forward = before
