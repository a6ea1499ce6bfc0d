"""`HookedTransformer`: the model class of TransformerLens 1.x to 3.x, over an engine.

The tree of modules carries hook points and shows weights; every forward asks the engine, with a tap for each live place of the
tree. Numbers are TransformerLens' processed ones by default, shown as views of the raw model (engine/processed.py).
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compat.tlens import components
from compat.tlens.ActivationCache import ActivationCache
from compat.tlens.circuits import CircuitMethods
from compat.tlens.errors import require
from compat.tlens.hook_points import HookPoint
from compat.tlens.HookedRootModule import HookedRootModule
from compat.tlens.HookedTransformerConfig import HookedTransformerConfig, config_from_facts
from compat.tlens.live import live_taps
from compat.tlens.loading_from_pretrained import checkpoint_fields, checkpoint_revision, get_official_model_name
from compat.tlens.parameters import Blocks, ModelParameters, WeightModule
from compat.tlens.past_key_value_caching import HookedTransformerKeyValueCache
from compat.tlens.sampling import Prompt, Sampling, Stream, accept_generation_kwargs, read_prompt
from compat.tlens.tokens import TokenMethods, check_token_ids, tokenizer_options
from compat.tlens.utils import USE_DEFAULT_VALUE, LocallyOverridenDefaults, get_attention_mask, get_device, lm_cross_entropy_loss
from compat.tlens.utilities.devices import move_to_and_update_config
from engine.load import load_engine
from engine.errors import BadInput, Refused, UnknownName
from engine.points import POINTS, Address
from engine.processed import Pass, Processed, Processing
from engine.seam import Batch, Engine
from engine.taps import Tap
from mappers import tlens as mapper

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
# Fields of cfg that TransformerLens reads at every forward, and that say how this model computes.
COMPUTES = (
    *("n_layers", "n_heads", "d_head", "n_key_value_heads", "attn_only", "parallel_attn_mlp", "normalization_type"),
    *("positional_embedding_type", "attn_scores_soft_cap", "use_qk_norm", "use_normalization_before_and_after"),
    *("rotary_dim", "rotary_adjacent_pairs", "act_fn", "gated_mlp", "eps"),
)
# hook_embed and hook_tokens stay silent in generate: TransformerLens embeds there without them.
SILENT_IN_GENERATE = ("hook_embed", "hook_tokens")
SILENT_WITHOUT_LOGITS = ("unembed.hook_in", "unembed.hook_out")


class Output(NamedTuple):
    """What `return_type="both"` returns."""

    logits: Tensor  # [batch, pos, d_vocab]
    loss: Tensor


class HookedTransformer(TokenMethods, CircuitMethods, HookedRootModule):
    """A decoder with a hook point on every activation. Load one with `from_pretrained`."""

    def __init__(
        self,
        cfg: HookedTransformerConfig | dict,
        tokenizer: Any = None,
        move_to_device: bool = True,
        default_padding_side: Literal["left", "right"] | None = None,
    ) -> None:
        super().__init__()
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        loaded = vars(self.cfg).pop("_loaded", None)
        if loaded is None:
            raise Refused(
                "HookedTransformer(cfg) builds a model with random weights, which is not served yet; "
                "load a checkpoint with HookedTransformer.from_pretrained(name), or pass a module with hf_model="
            )
        self.engine: Engine
        self.engine, processing = loaded
        self.processed = Processed(self.engine, processing)
        self.weights_shown = ModelParameters(self.processed, self._parameters)
        self.folded = self.processed.processing.fold_norm
        self._computes = {name: getattr(self.cfg, name) for name in COMPUTES}
        self.tokenizer, self.dataset = None, None
        tokenizer = tokenizer if tokenizer is not None else self.engine.tokenizer
        if tokenizer is not None:
            self.set_tokenizer(tokenizer, default_padding_side=default_padding_side)
        elif default_padding_side is not None:
            logging.warning("default_padding_side is ignored: the model has no tokenizer")
        self._build_tree()
        self.setup()

    def _build_tree(self) -> None:
        facts, cfg, weights = self.engine.facts, self.cfg, self.weights_shown
        self.embed = components.Embed(weights, cfg)
        self.hook_embed = HookPoint()  # [batch, pos, d_model]
        if facts.positions == "learned":
            self.pos_embed = components.PosEmbed(weights, cfg)
            self.hook_pos_embed = HookPoint()  # [batch, pos, d_model]
        if cfg.use_hook_tokens:
            self.hook_tokens = HookPoint()  # [batch, pos]
        self.blocks = Blocks(components.TransformerBlock(weights, cfg, facts, layer) for layer in range(facts.n_layers))
        self.ln_final = components.NORMS[cfg.normalization_type](weights, cfg, "final_norm", None)
        self.unembed = components.Unembed(weights, cfg)
        for block in self.blocks:
            block.run_alone = block.attn.run_alone = self._run_alone
        self._addresses: dict[tuple[str, int | None], Address] = {}
        self.absent = self._prune_tree()

    def _prune_tree(self) -> dict[str, str]:
        """Takes out the hook points of places that this checkpoint lacks, or a layer of it; gives each name's reason."""
        facts, absent = self.engine.facts, {}
        for name in mapper.names(facts, use_hook_tokens=self.cfg.use_hook_tokens):
            reason = None if mapper.flag(name) else self.engine.refuses(mapper.to_address(name, facts), "read")
            if reason is not None:
                absent[name] = reason
                owner, _, attribute = name.rpartition(".")
                self.get_submodule(owner)._modules.pop(attribute, None)
        for owner in {name.rpartition(".")[0] for name in absent}:
            holder, _, attribute = owner.rpartition(".")
            if isinstance(self.get_submodule(owner), (components.Norm, components.MLP)) and not self.get_submodule(owner)._modules:
                del self.get_submodule(holder)._modules[attribute]
        return absent

    def _why_unknown(self, name: str) -> str:
        if name in self.absent:
            return f"{name} is absent on {self.engine.facts.architecture}: {self.absent[name]}"
        try:
            address = mapper.to_address(name, self.engine.facts)
        except UnknownName as unknown:
            return unknown.hint or super()._why_unknown(name)
        except Refused as unmapped:
            return str(unmapped)
        return f"TransformerBridge's {name} is {mapper.to_names(address, self.engine.facts)[0]} here"

    def address_of(self, row: mapper.Row, layer: int | None) -> Address:
        """Where a hook point's value lives in the engine."""
        key = (row.point, layer)
        if key not in self._addresses:
            self._addresses[key] = self.processed.shown_at(Address(row.point, layer))
        return self._addresses[key]

    # --- loading ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        checkpoint_label: int | None = None,
        hf_model: Any = None,
        device: str | torch.device | None = None,
        n_devices: int = 1,
        tokenizer: Any = None,
        move_to_device: bool = True,
        fold_value_biases: bool = True,
        default_prepend_bos: bool | None = None,
        default_padding_side: Literal["left", "right"] | None = None,
        dtype: str | torch.dtype = "float32",
        first_n_layers: int | None = None,
        n_ctx: int | None = None,
        **from_pretrained_kwargs: Any,
    ) -> HookedTransformer:
        """Loads a model by TransformerLens name or alias, hub id or local folder, or takes `hf_model` as it is.

        The flags choose which parts of TransformerLens' weight processing the numbers show; no weight is changed.
        first_n_layers: keep only the first blocks. Other keywords go to transformers' `from_pretrained`.
        Raises `UnknownModel` (a ValueError) for a name that nothing answers to, `LoadFailed` (an OSError) for a checkpoint
        that cannot be read or whose parts cannot be resolved.
        """
        quantized = from_pretrained_kwargs.get("load_in_8bit") or from_pretrained_kwargs.get("load_in_4bit")
        require(not quantized, "Quantization not supported")
        if refactor_factored_attn_matrices:
            raise Refused("refactor_factored_attn_matrices gives heads another basis; load without it and use FactoredMatrix.svd")
        for kind, other in (("t5", "HookedEncoderDecoder"), ("bert", "HookedEncoder")):
            if os.fspath(model_name).lower().startswith(kind):
                raise Refused(f"{model_name} is no decoder; TransformerLens loads it with {other}, which is not served")
        name = get_official_model_name(model_name)
        dtype = _dtype(from_pretrained_kwargs.pop("torch_dtype", None) or dtype)
        if hf_model is not None:
            _check_hf_model(hf_model, dtype, first_n_layers)
        checkpoint: dict[str, Any] = {}
        if not checkpoint_index is checkpoint_value is checkpoint_label is None:
            if None not in (checkpoint_value, checkpoint_label):
                raise BadInput("checkpoint_value and checkpoint_label are the same thing; give one")
            checkpoint = checkpoint_fields(name, checkpoint_index, checkpoint_label if checkpoint_value is None else checkpoint_value)
            from_pretrained_kwargs["revision"] = checkpoint_revision(name, checkpoint["checkpoint_value"])
        if first_n_layers is not None:
            require(first_n_layers > 0, f"first_n_layers must be at least 1, not {first_n_layers}")
            from_pretrained_kwargs["num_hidden_layers"] = first_n_layers
        device = device if device is not None or hf_model is not None else get_device()
        engine = load_engine(
            name,
            hf_model=hf_model,
            tokenizer=tokenizer,
            tokenizer_options=tokenizer_options,
            dtype=dtype,
            device=device,
            **from_pretrained_kwargs,
        )
        if n_ctx is not None and n_ctx > engine.facts.n_ctx and engine.facts.positions == "learned":
            raise BadInput(f"n_ctx = {n_ctx}, but {name} has learned {engine.facts.n_ctx} positions")
        processing = Processing(fold_ln, center_writing_weights, center_unembed, fold_value_biases)
        fields = {"n_devices": n_devices} | checkpoint | ({} if n_ctx is None else {"n_ctx": n_ctx})
        cfg = config_from_facts(
            engine.facts,
            model_name=name,
            fold_ln=processing.for_family(engine.facts).fold_norm,
            default_prepend_bos=default_prepend_bos,
            **fields,
        )
        cfg._loaded = (engine, processing)
        model = cls(cfg, tokenizer, move_to_device=False, default_padding_side=default_padding_side)
        if hf_model is not None:
            model.weights_shown.lend()
        print(f"Loaded pretrained model {model_name} into HookedTransformer")
        return model

    @classmethod
    def from_pretrained_no_processing(
        cls,
        model_name: str,
        fold_ln: bool = False,
        center_writing_weights: bool = False,
        center_unembed: bool = False,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = False,
        dtype: str | torch.dtype = torch.float32,
        default_prepend_bos: bool | None = None,
        default_padding_side: Literal["left", "right"] | None = None,
        **from_pretrained_kwargs: Any,
    ) -> HookedTransformer:
        """`from_pretrained` with every part of the processing off: the checkpoint's own numbers."""
        options = {name: value for name, value in locals().items() if name not in ("cls", "model_name", "from_pretrained_kwargs")}
        return cls.from_pretrained(model_name, **options, **from_pretrained_kwargs)

    # --- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input: str | list[str] | Tensor,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Literal["left", "right"] | None = USE_DEFAULT_VALUE,
        start_at_layer: int | None = None,
        tokens: Tensor | None = None,
        shortformer_pos_embed: Tensor | None = None,
        attention_mask: Tensor | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: HookedTransformerKeyValueCache | None = None,
    ) -> Any:
        """Logits `[batch, pos, d_vocab]`, the loss (a scalar, or `[batch, pos - 1]` per token), both, or None.

        input: text, texts, ids `[pos]` or `[batch, pos]`; with `start_at_layer` the residual `[batch, pos, d_model]` that
        enters that layer. With `stop_at_layer` the residual that would enter that layer is returned. Both count from the
        end when negative. attention_mask: `[batch, pos]`, 0 on padding. past_kv_cache is extended unless frozen.
        """
        if shortformer_pos_embed is not None:
            raise Refused("shortformer models are not served")
        with LocallyOverridenDefaults(self, prepend_bos=prepend_bos, padding_side=padding_side):
            residual = None
            if start_at_layer is None and self.input_to_embed.__func__ is not HookedTransformer.input_to_embed:
                residual, tokens, _, attention_mask = self.input_to_embed(
                    input, prepend_bos, padding_side, attention_mask, past_kv_cache
                )
            elif start_at_layer is None:
                tokens = self._tokens(input)
                attention_mask = self._mask(tokens, attention_mask, past_kv_cache)
            else:
                residual = self._residual(input)
        first, last, _ = slice(start_at_layer, stop_at_layer).indices(self.cfg.n_layers)
        if residual is not None and stop_at_layer is not None and last <= first:
            return residual
        batch = Batch(tokens, attention_mask) if residual is None else Batch(None, attention_mask, embeds=residual)
        logits, shown = self._run(
            batch,
            start=None if residual is None else (first, residual),
            stop=None if stop_at_layer is None else max(first, last),
            past_kv_cache=past_kv_cache,
            unembed=return_type is not None,
        )
        if stop_at_layer is not None:
            return shown.show_stream(logits)
        if return_type is None:
            return None
        logits = shown.show_logits(logits)
        if self._softcap != self.engine.facts.logit_softcap and self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return self._returned(logits, return_type, tokens, attention_mask, loss_per_token)

    def _returned(self, logits: Tensor, return_type: str, tokens: Tensor | None, mask: Tensor | None, per_token: bool) -> Any:
        if return_type == "logits":
            return logits
        require(tokens is not None, "tokens must be passed in if return_type is 'loss' or 'both'")
        if return_type not in ("loss", "both"):
            logging.warning(f"Invalid return_type passed in: {return_type}")
            return None
        loss = self.loss_fn(logits, tokens, mask, per_token)
        return loss if return_type == "loss" else Output(logits, loss)

    def _tokens(self, input: str | list[str] | Tensor) -> Tensor:
        """Ids `[batch, pos]` on the model's device."""
        if isinstance(input, (str, list)):
            require(self.tokenizer is not None, "Must provide a tokenizer if passing a string to the model")
            require(len(input) > 0 or isinstance(input, str), "the input is an empty list")
            input = self.to_tokens(input)
        require(isinstance(input, Tensor), f"the input is text, texts or a tensor of token ids, not {type(input).__name__}")
        tokens = input[None] if input.dim() == 1 else input
        check_token_ids(tokens, self.cfg.d_vocab)
        if tokens.dim() != 2 or tokens.numel() == 0:
            raise BadInput(f"token ids are [pos] or [batch, pos], with at least one of each; got {list(input.shape)}")
        self._check_length(tokens.shape[1], "the prompt")
        return tokens.to(self.cfg.device)

    def _check_length(self, positions: int, what: str) -> None:
        if positions > self.cfg.n_ctx:
            raise BadInput(f"{what} has {positions} positions, but {self.cfg.model_name} has n_ctx = {self.cfg.n_ctx}")

    def _residual(self, input: Any) -> Tensor:
        """What enters the layer `start_at_layer`."""
        require(isinstance(input, Tensor), "with start_at_layer the input is a residual, a tensor")
        due = (self.cfg.d_model, self.cfg.dtype)
        if input.dim() != 3 or (input.shape[-1], input.dtype) != due:
            raise BadInput(
                f"with start_at_layer the input is a residual [batch, pos, {due[0]}] {due[1]}, not {list(input.shape)} {input.dtype}"
            )
        self._check_length(input.shape[1], "the residual")
        return input.to(self.cfg.device)

    def _mask(self, tokens: Tensor, mask: Tensor | None, past: HookedTransformerKeyValueCache | None) -> Tensor | None:
        """The attention mask `[batch, past + pos]`, or None where nothing is padding. Right padding needs none."""
        left = self.tokenizer is not None and self.tokenizer.padding_side == "left"
        if mask is None and past is None and not left:
            return None
        if mask is None:
            if self.tokenizer is None:
                raise BadInput("Cannot compute attention mask without a tokenizer.")
            mask = get_attention_mask(self.tokenizer, tokens, self.cfg.default_prepend_bos)
        require(mask.shape == tokens.shape, f"Attention mask shape {mask.shape} does not match tokens shape {tokens.shape}")
        return mask.to(self.cfg.device) if past is None else past.append_attention_mask(mask.to(self.cfg.device))

    def _run(
        self,
        batch: Batch,
        *,
        start: tuple[int, Tensor] | None = None,
        stop: int | None = None,
        past_kv_cache: HookedTransformerKeyValueCache | None = None,
        unembed: bool = True,
        taps: Sequence[Tap] = (),
        alone: nn.Module | None = None,
    ) -> tuple[Tensor | None, Pass]:
        """One engine forward with every live place tapped; the raw result, and the views to show it with."""
        self._check_cfg()
        with self.weights_shown.forward():
            shown = self.processed.new_pass()
            if start is not None:
                start = (start[0], shown.enter_stream(start[1]))
            silent = () if unembed else SILENT_WITHOUT_LOGITS
            live = live_taps(self, shown, leave_out=silent, alone=alone, mask=batch.mask, cached=past_kv_cache is not None)
            taps = [*taps, *live]
            uncapped: list[Tensor] = []
            if self._softcap != self.engine.facts.logit_softcap:
                taps.append(Tap(Address("lm_head"), uncapped.append, reads=True))
            cache = None
            if past_kv_cache is not None:
                cache, reads = _extended(past_kv_cache, self.processed, shown)
                taps += reads
            grad = torch.is_grad_enabled()
            result = self.engine.run(batch, taps, start=start, stop=stop, cache=cache, grad=grad, unembed=unembed)
        if cache is not None and not past_kv_cache.frozen:
            past_kv_cache.wrote(cache)
        return (uncapped[0] if uncapped else result), shown

    def _check_cfg(self) -> None:
        """Refuses an edit of cfg that TransformerLens would compute with."""
        changed = [name for name, value in self._computes.items() if getattr(self.cfg, name) != value]
        if self.cfg.ungroup_grouped_query_attention:
            self.set_ungroup_grouped_query_attention(True)
        if changed:
            raise Refused(f"cfg.{changed[0]} was changed after loading, but the model computes as its checkpoint says")

    @property
    def _softcap(self) -> float | None:
        """What `cfg` says now of a soft cap on the logits; programs turn it off for a while."""
        cap = self.cfg.output_logits_soft_cap
        return cap if cap > 0 else None

    def _run_alone(self, module: nn.Module, inputs: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
        """One block on a residual, or one attention on its normalized inputs, with the hooks inside it."""
        layer = module.layer_index
        if isinstance(module, components.TransformerBlock):
            out, shown = self._run(Batch(None, mask, embeds=inputs[0]), start=(layer, inputs[0]), stop=layer + 1, alone=module)
            return shown.show_stream(out)
        dummy = torch.zeros_like(inputs[0])
        got: list[Tensor] = []
        if self.folded:  # the norm before attention hands q, k and v their inputs one after another
            address = Address("attn_norm_normalized", layer)
            view = self.processed.new_pass().view(address)
            waiting = list(inputs if view is None else map(view[1], inputs))
            feed = Tap(address, lambda x: waiting.pop(0).to(x))
        else:
            require(inputs[0] is inputs[1] is inputs[2], "without fold_ln one tensor is the input of q, k and v")
            feed = Tap(Address("attn_in", layer), lambda x: inputs[0])
        read = Tap(Address("attn_out", layer), lambda x: got.append(x), reads=True)
        _, shown = self._run(
            Batch(None, mask, embeds=dummy), start=(layer, dummy), stop=layer + 1, taps=[feed, read], alone=module
        )
        view = shown.view(Address("attn_out", layer))
        return got[0] if view is None else view[0](got[0])

    def input_to_embed(
        self,
        input: str | list[str] | Tensor,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Literal["left", "right"] | None = USE_DEFAULT_VALUE,
        attention_mask: Tensor | None = None,
        past_kv_cache: HookedTransformerKeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor, None, Tensor | None]:
        """The residual that enters block 0 `[batch, pos, d_model]`, the ids, None, and the attention mask if one is needed."""
        with LocallyOverridenDefaults(self, prepend_bos=prepend_bos, padding_side=padding_side):
            tokens = self._tokens(input)
            mask = self._mask(tokens, attention_mask, past_kv_cache)
        residual, shown = self._run(Batch(tokens, mask), stop=0, past_kv_cache=past_kv_cache)
        return shown.show_stream(residual), tokens, None, mask

    def loss_fn(
        self, logits: Tensor, tokens: Tensor, attention_mask: Tensor | None = None, per_token: bool = False
    ) -> Tensor:
        """Next-token cross entropy: the mean, or `[batch, pos - 1]`."""
        return lm_cross_entropy_loss(logits, tokens.to(logits.device), attention_mask, per_token)

    def run_with_cache(
        self, *model_args: Any, return_cache_object: bool = True, remove_batch_dim: bool = False, **kwargs: Any
    ) -> tuple[Any, ActivationCache | dict[str, Tensor]]:
        """One forward and its activations by name; see `HookedRootModule.run_with_cache` for the arguments."""
        out, cache = super().run_with_cache(*model_args, remove_batch_dim=remove_batch_dim, **kwargs)
        cache = dict(sorted(cache.items(), key=lambda item: self._firing_order(item[0])))
        return out, ActivationCache(cache, self, has_batch_dim=not remove_batch_dim) if return_cache_object else cache

    def _firing_order(self, name: str) -> tuple[bool, int, int]:
        """Sorts names as TransformerLens fires them: q, k and v before the norms of q and k; gradients come after, backwards."""
        backward, name = name.endswith("_grad"), name.removesuffix("_grad")
        try:
            address = mapper.to_address(name, self.engine.facts)
        except KeyError:  # a hook point that the user added
            return backward, 0, 0
        point = list(POINTS).index(address.point)
        layer = address.layer if address.layer is not None else -1 if point < list(POINTS).index("resid_pre") else self.cfg.n_layers
        return (backward, -layer, -point) if backward else (backward, layer, point)

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: Any,
        dir: str = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        flag = mapper.flag(hook_point_name)
        require(
            flag is None or getattr(self.cfg, flag), f"Cannot add hook {hook_point_name} if {flag} is False: it would never fire"
        )

    def _enable_hook(self, name: Any, hook: Any, dir: Any) -> None:
        """A hook of a context by its own name must be able to fire; a sweep over names passes over what is switched off."""
        if isinstance(name, str) and name in self.mod_dict and not getattr(hook, "reads_only", False):
            self.check_hooks_to_add(self.mod_dict[name], name, hook, dir=dir)
        super()._enable_hook(name, hook, dir)

    # --- generation ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def generate(
        self,
        input: str | list[str] | Tensor = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Literal["left", "right"] | None = USE_DEFAULT_VALUE,
        return_type: str | None = "input",
        verbose: bool = True,
        **generation_kwargs: Any,
    ) -> Any:
        """Continues a prompt: text, texts (padded on the left), ids `[batch, pos]` or embeddings `[batch, pos, d_model]`.

        Hooks fire at every step: on the whole prompt, then on one position a step (on everything again without
        `use_past_kv_cache`). Samples by default. return_type: "input" mirrors the input, or "str", "tokens", "embeds".
        output_logits=True returns Hugging Face's output with the logits of each step.
        """
        output_logits = accept_generation_kwargs(generation_kwargs)
        with LocallyOverridenDefaults(self, prepend_bos=prepend_bos, padding_side=padding_side):
            prompt = read_prompt(self, input, return_type, prepend_bos, padding_side)
            sampling = Sampling(
                prompt, self.tokenizer, max_new_tokens, stop_at_eos=stop_at_eos, eos_token_id=eos_token_id, do_sample=do_sample,
                top_k=top_k, top_p=top_p, temperature=temperature, freq_penalty=freq_penalty, output_logits=output_logits,
            )
            for _ in tqdm(self._steps(prompt, sampling, use_past_kv_cache), total=max_new_tokens, disable=not verbose):
                pass
            return sampling.result(self.tokenizer, self.embed)

    @torch.inference_mode()
    def generate_stream(
        self,
        input: str | Tensor = "",
        max_new_tokens: int = 10,
        max_tokens_per_yield: int = 25,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Literal["left", "right"] | None = USE_DEFAULT_VALUE,
        return_type: str | None = "input",
        verbose: bool = True,
    ) -> Iterator[Tensor]:
        """`generate`, handed out piece by piece as ids `[batch, pos]`, also for a text; the first piece has the prompt too."""
        with LocallyOverridenDefaults(self, prepend_bos=prepend_bos, padding_side=padding_side):
            prompt = read_prompt(self, input, return_type, prepend_bos, padding_side)
            sampling = Sampling(
                prompt, self.tokenizer, max_new_tokens, stop_at_eos=stop_at_eos, eos_token_id=eos_token_id, do_sample=do_sample,
                top_k=top_k, top_p=top_p, temperature=temperature, freq_penalty=freq_penalty,
            )
            stream = Stream(prompt.tokens, max_tokens_per_yield)
            steps = self._steps(prompt, sampling, use_past_kv_cache, silent=())
            for ids in tqdm(steps, total=max_new_tokens, disable=not verbose):
                piece = stream.push(ids)
                if piece is not None:
                    yield piece
            rest = stream.rest()
            if rest is not None:
                yield rest

    def _steps(
        self, prompt: Prompt, sampling: Sampling, use_cache: bool, silent: tuple[str, ...] = SILENT_IN_GENERATE
    ) -> Iterator[Tensor]:
        """Runs the engine until the sampling is done, and hands out each step's ids `[batch]`. silent: rows that do not fire."""
        self._check_cfg()
        if self._softcap != self.engine.facts.logit_softcap:
            raise Refused("cfg.output_logits_soft_cap was changed; generate computes logits as the checkpoint says")
        if prompt.tokens is not None:
            self._tokens(prompt.tokens)
        start = (prompt.embeds if prompt.tokens is None else prompt.tokens).shape[1]
        mask = None if prompt.mask is None or bool(prompt.mask.all()) else prompt.mask
        batch = Batch(prompt.tokens, mask, embeds=prompt.embeds)
        latest: list[Pass] = []

        def taps(step: int = 0) -> list[Tap]:
            self._check_length(start + len(sampling.chosen), "what has been generated")
            latest[:] = [self.processed.new_pass()]
            return live_taps(self, latest[0], leave_out=silent, mask=batch.mask, cached=use_cache)

        def choose(logits: Tensor) -> Tensor | None:
            return None if sampling.done else sampling.next(latest[0].show_last_logits(logits))

        if sampling.done:
            return
        with self.weights_shown.forward():
            if use_cache:
                for ids in self.engine.generate(batch, taps, choose):
                    yield ids
                    if sampling.done:
                        break
            while not sampling.done:
                if sampling.chosen:
                    if prompt.embeds is not None:
                        batch = Batch(None, None, embeds=torch.hstack([prompt.embeds, self.embed(sampling.new_tokens)]))
                    else:
                        batch = Batch(sampling.tokens, None if mask is None else sampling.mask)
                yield choose(self.engine.run(batch, taps())[:, -1])

    # --- what the model is made of ------------------------------------------------------------------------------------

    # The Hugging Face model's parameters are this module's own too, under their names there (which have dots), so that an
    # optimizer, `requires_grad_` or a module that holds this one finds them. State dicts have the processed weights instead.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names, and those of modules put into the tree under their names there."""
        self.weights_shown.lend()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    @contextmanager
    def _without_raw_parameters(self) -> Iterator[None]:
        whole = self._parameters
        self._parameters = {name: parameter for name, parameter in whole.items() if "." not in name}
        try:
            yield
        finally:
            whole.update(self._parameters)
            self._parameters = whole

    def _save_to_state_dict(self, *args: Any) -> None:
        with self._without_raw_parameters():
            super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._without_raw_parameters():
            super()._load_from_state_dict(*args)

    def _apply(self, fn: Any, recurse: bool = True) -> HookedTransformer:
        self.weights_shown.carry_edits()
        self.engine.model._apply(fn)
        self.engine.refresh_facts()
        self.weights_shown.moved()
        self.cfg.dtype = self.engine.facts.dtype
        self._addresses.clear()
        with self._without_raw_parameters():
            return super()._apply(fn, recurse)

    @property
    def n_params_total(self) -> int:
        """The number of weights that TransformerLens counts: untied, and with the biases that a checkpoint leaves out."""
        shown = [(module, name) for module in self.modules() if isinstance(module, WeightModule) for name in module.weights().values()]
        return sum(self.weights_shown.peek(name, module.layer_index).numel() for module, name in shown)

    def to(self, device_or_dtype: torch.device | str | torch.dtype, print_details: bool = True) -> HookedTransformer:
        """Moves or casts the model, and `cfg` with it."""
        return move_to_and_update_config(self, device_or_dtype, print_details)

    def cuda(self, device: int | torch.device | None = None) -> HookedTransformer:
        return self.to("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)

    def cpu(self) -> HookedTransformer:
        return self.to(torch.device("cpu"))

    def mps(self) -> HookedTransformer:
        return self.to(torch.device("mps"))

    def move_model_modules_to_device(self) -> None:
        """Moves the model to `cfg.device`."""
        self.to(self.cfg.device, print_details=False)

    # --- switches -----------------------------------------------------------------------------------------------------

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether `hook_result`, each head's share of attention's output, is computed and fires."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Whether each head's query, key and value reads a copy of the stream of its own."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Whether `hook_mlp_in`, the MLP's own copy of the stream, fires."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Whether `hook_attn_in`, each head's own copy of the stream, fires."""
        require(
            self.cfg.n_key_value_heads is None,
            "Can't use attn_in with GroupedQueryAttention, please use split_qkv_input instead",
        )
        self.cfg.use_attn_in = use_attn_in

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Refused when on: keys and values keep one head a group here, as the model computes them."""
        if ungroup_grouped_query_attention and self.engine.facts.n_kv_heads != self.engine.facts.n_heads:
            raise Refused("ungrouped keys and values are not served yet; hook_k and hook_v have one head a group")
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UnknownName(dtype, DTYPES, what="dtype", hint=f"One of {', '.join(DTYPES)}, or a torch.dtype.")
    return DTYPES[dtype] if isinstance(dtype, str) else dtype


def _check_hf_model(hf_model: Any, dtype: torch.dtype, first_n_layers: int | None) -> None:
    """A module is taken as it is, so options that ask for another one are refused. float32 is everybody's default."""
    require(hasattr(hf_model, "config"), f"hf_model must be a model of transformers, not {type(hf_model).__name__}")
    if dtype not in (torch.float32, hf_model.dtype):
        raise BadInput(f"dtype is {dtype}, but hf_model, which is taken as it is, has {hf_model.dtype}; cast it with hf_model.to(...)")
    if first_n_layers is not None:
        raise BadInput("hf_model is taken as it is, with all its layers; load it with num_hidden_layers= instead of first_n_layers=")


def _extended(past: HookedTransformerKeyValueCache, processed: Processed, shown: Pass) -> tuple[Any, list[Tap]]:
    """The engine's cache that a run continues (a copy if frozen), and the taps that keep the entries in step with it."""
    reason = past.disagreement()
    if reason is not None:
        raise Refused(f"past_kv_cache cannot be continued: {reason}")
    engine, cache = processed.engine, past.engine_cache
    if cache is None:
        cache = engine.new_cache()
        cache.processing = processed.processing
    if cache.processing != processed.processing:
        raise Refused("past_kv_cache holds values from before the first edit of a weight; fill a new one")
    cache = copy.deepcopy(cache) if past.frozen else cache
    keys = "k_norm_out" if engine.facts.qk_norm else "k"  # TransformerLens keeps keys after QK-norm, before rotary
    made: list[dict[str, Tensor]] = [{} for _ in past.entries]
    taps = []
    for layer, entry in enumerate(past.entries):
        address = Address("value", layer)
        view = shown.view(address)

        def note(kind: str, value: Tensor, layer: int = layer, entry: Any = entry) -> None:
            """Families differ in which of the two they make first."""
            made[layer][kind] = value
            if len(made[layer]) == 2:
                entry.append(*(made[layer].pop(kind) for kind in ("keys", "values")))

        def note_value(value: Tensor, note: Any = note, view: Any = view) -> None:
            note("values", value if view is None else view[0](value))

        def note_key(key: Tensor, note: Any = note) -> None:
            note("keys", key)

        taps += [Tap(Address(keys, layer), note_key, reads=True), Tap(address, note_value, reads=True)]
    return cache, taps
