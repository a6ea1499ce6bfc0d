"""Processed numerics as views: norms folded, writing weights and unembedding centred, value biases folded, no weight touched.

Each processed activation is an affine view of the raw one, so one raw engine serves both, and an edit of the view goes back
through its inverse. With W' the processed weights (formulas: Elhage et al. 2021, "A Mathematical Framework for Transformer
Circuits", and LayerNorm's invariance to the mean of its input):

    reading weights   W' = gain * W, centred over D on LayerNorm models (but for a gate);  b' = b + norm_bias W
    writing weights   W' and b' centred over D (LayerNorm models only)
    value bias        c = b_V + norm_bias W_V goes into the output bias:  b_O' = b_O + sum_h c_h W_O_h, and b_V' = 0
    unembedding       W_U' = gain * W_U, centred over D, then over V;  b_U' = b_U + norm_bias W_U, centred over V

Where a model multiplies its logits by a constant, that is part of W_U and b_U, processed or not, so that they give the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import Refused
from engine.points import Address
from engine.seam import Engine, Facts
from engine.taps import Tap


@dataclass(frozen=True)
class Processing:
    """Which parts of the processing are on."""

    fold_norm: bool = True
    centre_writing: bool = True
    centre_unembed: bool = True
    fold_value_biases: bool = True

    def for_family(self, facts: Facts) -> Processing:
        """The parts that leave the model the same: RMSNorm models keep their mean, a soft cap after the unembedding feels a
        shift, norms after the sublayers have nothing to fold into, and a value's bias comes through an attention sink scaled.
        """
        return Processing(
            self.fold_norm and facts.pre_norms,
            self.centre_writing and facts.norm == "layer" and facts.pre_norms,
            self.centre_unembed and facts.logit_softcap is None,
            self.fold_value_biases and not facts.sinks,
        )


RAW = Processing(False, False, False, False)

# points whose value is what a writing weight adds to the stream, and points that are the stream itself
CONTRIBUTIONS = ("embeddings", "pos_embed", "attn_out", "attn_out_post", "mlp_out", "mlp_out_post")
STREAM = ("resid_pre", "resid_mid", "resid_post")
STREAM_COPIES = ("attn_stream_in", "q_input", "k_input", "v_input", "mlp_stream_in")
_FOLDED_NORMS = ("attn_norm_normalized", "mlp_norm_normalized", "final_norm_normalized")
_READS_FROM = {"q": "attn_norm", "k": "attn_norm", "v": "attn_norm", "mlp_in": "mlp_norm", "mlp_gate": "mlp_norm"}


def _same(x: Tensor) -> Tensor:
    return x


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


class Processed:
    """The processed weights of an engine, and a `Pass` for each forward that shows its activations the same way."""

    def __init__(self, engine: Engine, wanted: Processing) -> None:
        self.engine = engine
        self.processing = wanted.for_family(engine.facts)
        self._value_offsets: dict[int, Tensor] = {}

    def forget(self) -> None:
        """Drops what was computed from the raw weights; call it when they were changed or moved."""
        self._value_offsets.clear()

    def shown_at(self, address: Address) -> Address:
        """With norms folded, what the unembedding receives is the normalized stream before gain and bias."""
        folded = self.processing.fold_norm and address.point == "final_norm"
        return Address("final_norm_normalized") if folded else address

    def value_offset(self, layer: int) -> Tensor | None:
        """c, what the view takes off the values of a layer, `[K, dh]`; None where it is nothing."""
        if not self.processing.fold_value_biases or not self.engine.weights.has("v", layer):
            return None
        if layer not in self._value_offsets:
            self._value_offsets[layer] = self._bias("v", layer).detach()
        offset = self._value_offsets[layer]
        return offset if bool(offset.any()) else None

    @torch.no_grad()
    def weight(self, name: str, layer: int | None = None) -> Tensor:
        """A processed weight or bias, by the names and layouts of `engine.seam.Weights`."""
        on = self.processing
        base, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
        if base in _READS_FROM:
            return self._reading_bias(base, layer) if is_bias else self._reading(base, layer)
        if base == "unembed":
            value = self._unembed_bias() if is_bias else self._unembed()
            return centred(value) if on.centre_unembed else value
        if name == "o_bias":
            value = self._output_bias(layer)
        else:
            value = self.engine.weights(name, layer)
        return centred(value) if on.centre_writing and base in ("embed", "pos_embed", "o", "mlp_out") else value

    def _folds(self, norm: str, layer: int | None) -> bool:
        """Whether a norm's gain and bias are in the weights that read its output. They stay where a router, experts, a gate on
        attention's output or another mixer read it, whose weights are not shown."""
        if norm == "attn_norm" and self.engine.refuses(Address("attn_gate", layer), "read") is None:
            return False
        has, readers = self.engine.weights.has, [name for name, read in _READS_FROM.items() if read == norm]
        readers = [name for name in readers if name != "mlp_gate" or self.engine.facts.gated_mlp]
        return self.processing.fold_norm and has(f"{norm}_gain", layer) and all(has(name, layer) for name in readers)

    def _reading(self, name: str, layer: int) -> Tensor:
        raw, norm = self.engine.weights(name, layer), _READS_FROM[name]
        if not self._folds(norm, layer):
            return raw
        folded = raw * self.engine.weights(f"{norm}_gain", layer)[:, None]
        centres = self.engine.facts.norm == "layer" and name != "mlp_gate"  # a gate is left as it is
        return folded - folded.mean(-2, keepdim=True) if centres else folded

    def _reading_bias(self, name: str, layer: int) -> Tensor:
        if name == "v" and self.processing.fold_value_biases:
            return torch.zeros_like(self.engine.weights("v_bias", layer))
        return self._bias(name, layer)

    def _bias(self, name: str, layer: int) -> Tensor:
        """b + norm_bias W, with the raw W."""
        bias, norm = self.engine.weights(f"{name}_bias", layer), _READS_FROM[name]
        if not self._folds(norm, layer):
            return bias
        return bias + self.engine.weights(f"{norm}_bias", layer) @ self.engine.weights(name, layer)

    def _output_bias(self, layer: int) -> Tensor:
        bias, offset = self.engine.weights("o_bias", layer), self.value_offset(layer)
        if offset is None:
            return bias
        return bias + torch.einsum("hd,hdm->m", self.per_query_head(offset), self.engine.weights("o", layer))

    def _unembed(self) -> Tensor:
        raw = self._scaled(self.engine.weights("unembed"))
        if not self.processing.fold_norm:
            return raw
        folded = raw * self.engine.weights("final_norm_gain")[:, None]
        return folded - folded.mean(0, keepdim=True) if self.engine.facts.norm == "layer" else folded

    def _unembed_bias(self) -> Tensor:
        bias = self._scaled(self.engine.weights("unembed_bias"))
        if not self.processing.fold_norm:
            return bias
        return bias + self.engine.weights("final_norm_bias") @ self._scaled(self.engine.weights("unembed"))

    def _scaled(self, unembedding: Tensor) -> Tensor:
        scale = self.engine.facts.logit_scale
        return unembedding if scale == 1 else unembedding * scale

    def per_query_head(self, per_kv_head: Tensor) -> Tensor:
        """`[K, ...]` -> `[H, ...]`."""
        facts = self.engine.facts
        return per_kv_head.repeat_interleave(facts.n_heads // facts.n_kv_heads, dim=0)

    @torch.inference_mode(False)  # parameters that come into being here must serve a later backward
    @torch.no_grad()
    def write(self, edits: dict[tuple[str, int | None], Tensor]) -> None:
        """Writes the processed weights, with these edits of them, into the model; from then on the raw model is the processed.

        Raises `Refused` where the engine cannot hold them.
        """
        self._refuse_half_a_norm(edits)
        self.engine.weights.prepare_writing()
        if self.processing != RAW:
            for layer in range(self.engine.facts.n_layers):
                self._write_layer(layer)
            self._write_ends()
            self.processing, self._value_offsets = RAW, {}
        for (name, layer), value in edits.items():
            self._put(name, layer, value)

    def _refuse_half_a_norm(self, edits: dict[tuple[str, int | None], Tensor]) -> None:
        norms = {"attn_norm_": "mlp_norm_", "mlp_norm_": "attn_norm_"}
        for (name, layer), value in edits.items() if self.engine.facts.shared_norm else ():
            other = next((norms[n] + name.removeprefix(n) for n in norms if name.startswith(n)), None)
            if other is not None and not torch.equal(value, edits.get((other, layer), self.weight(name, layer))):
                raise Refused(
                    f"attention and the MLP of a {self.engine.facts.architecture} read one norm, so its weights cannot be edited "
                    f"for one of them alone: give {name} and {other} the same value, or edit what they read with a hook"
                )

    def _put(self, name: str, layer: int | None, shown: Tensor) -> None:
        if name in ("unembed", "unembed_bias"):
            shown = shown / self.engine.facts.logit_scale
        self.engine.weights.write(name, layer, shown)

    def _write_layer(self, layer: int) -> None:
        weights = self.engine.weights
        names = ("q", "k", "v", "o", "mlp_in", "mlp_gate", "mlp_out")
        values = {n: self.weight(n, layer) for name in names for n in (name, f"{name}_bias") if weights.has(n, layer)}
        for name, value in {name: value.clone() for name, value in values.items()}.items():
            weights.write(name, layer, value)
        for norm in set(_READS_FROM.values()):
            if self._folds(norm, layer):
                self._write_plain_norm(norm, layer)

    def _write_ends(self) -> None:
        weights = self.engine.weights
        names = [name for name in ("embed", "pos_embed", "unembed", "unembed_bias") if weights.has(name)]
        for name, value in {name: self.weight(name).clone() for name in names}.items():
            self._put(name, None, value)
        if self.processing.fold_norm:
            self._write_plain_norm("final_norm", None)

    def _write_plain_norm(self, norm: str, layer: int | None) -> None:
        gain = self.engine.weights(f"{norm}_gain", layer)
        self.engine.weights.write(f"{norm}_gain", layer, torch.ones_like(gain))
        self.engine.weights.write(f"{norm}_bias", layer, torch.zeros_like(gain))

    def new_pass(self) -> Pass:
        """The views of one forward."""
        return Pass(self)


View = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


class Pass:
    """The views of one forward. The stream's own mean never shows, but a mean that an edit writes is carried and does."""

    def __init__(self, processed: Processed) -> None:
        self._processed = processed
        self._on = processed.processing
        self._carried: Tensor | float = 0.0  # [b, p, 1], the mean that edits have put into the stream
        self._written: dict[Address, Tensor] = {}  # [b, p, 1], the mean that an edit wrote at an address off the stream
        self._row_sums: dict[int, Tensor] = {}

    def view(self, address: Address) -> View | None:
        """(raw -> shown, shown -> raw) at an address, or None where they are the same."""
        point, on = address.point, self._on
        if point == "lm_head":
            return self._unembedding_view()
        if point == "logits":
            return self._off_stream(Address("lm_head")) if on.centre_unembed else None
        if point in ("value", "z"):
            offset = self._processed.value_offset(address.layer)
            if offset is None:
                return None
            offset = offset if point == "value" else self._processed.per_query_head(offset)
            return (lambda x: x - offset.to(x), lambda shown: shown + offset.to(shown))
        if point == "attn_result":
            return self._result_view(address.layer)
        if point in _FOLDED_NORMS and on.fold_norm and self._processed.engine.facts.norm == "layer":
            return self._normalized_view(address)
        if not on.centre_writing:
            return None
        if point in STREAM:
            return self.show_stream, self._take_stream
        if point in STREAM_COPIES:
            return (lambda x: self._show_copy(address, x)), (lambda shown: shown)
        if point == "embeddings" and self._processed.engine.facts.embed_norm:
            return (lambda x: x), self._take_stream  # a norm's output keeps its mean, and the stream begins with it
        if point in CONTRIBUTIONS:
            return self._off_stream(address)
        return None

    def enter_stream(self, residual: Tensor) -> Tensor:
        """A residual that the user starts the forward with keeps its mean."""
        return self._take_stream(residual) if self._on.centre_writing else residual

    def show_stream(self, x: Tensor) -> Tensor:
        """The stream `[b, p, D]`, or one copy a head `[b, p, heads, D]`."""
        if not self._on.centre_writing:
            return x
        carried = self._carried
        return centred(x) + (carried[:, :, None] if isinstance(carried, Tensor) and x.dim() == 4 else carried)

    def _show_copy(self, address: Address, x: Tensor) -> Tensor:
        """A branch's own copy of the stream. A parallel block's MLP reads the stream from before its attention wrote."""
        shown = self.show_stream(x)
        if address.point == "mlp_stream_in" and self._processed.engine.facts.parallel:
            shown = shown - self._written.get(Address("attn_out_post", address.layer), 0.0)
        return shown

    def _take_stream(self, shown: Tensor) -> Tensor:
        self._carried = shown.mean(-1, keepdim=True)
        return shown

    def show_logits(self, logits: Tensor) -> Tensor:
        """Logits `[batch, pos, d_vocab]`; where no gradient needs the raw ones, they are turned in place."""
        if not self._on.centre_unembed:
            return logits
        shift = self._written.get(Address("lm_head"), 0.0) - logits.mean(-1, keepdim=True)
        return logits + shift if logits.requires_grad else logits.add_(shift)

    def show_last_logits(self, logits: Tensor) -> Tensor:
        """Logits of the last position, `[batch, d_vocab]`."""
        if not self._on.centre_unembed:
            return logits
        written = self._written.get(Address("lm_head"))
        return centred(logits) + (0.0 if written is None else written[:, -1])

    def _unembedding_view(self) -> View | None:
        scale = self._processed.engine.facts.logit_scale
        show, take = self._off_stream(Address("lm_head")) if self._on.centre_unembed else (_same, _same)
        if scale == 1:
            return (show, take) if self._on.centre_unembed else None
        return (lambda x: show(x * scale)), (lambda shown: take(shown) / scale)

    def _off_stream(self, address: Address) -> View:
        """Centred, but for a mean that an edit at this address wrote; on its way into the stream that mean is carried."""
        if address.point in ("attn_out", "mlp_out"):  # LayerNorm models have no norm in between, so it is one value
            address = Address(f"{address.point}_post", address.layer)

        def show(x: Tensor) -> Tensor:
            return centred(x) + self._written.get(address, 0.0)

        def take(shown: Tensor) -> Tensor:
            self._carry(address, shown.mean(-1, keepdim=True))
            return shown

        return show, take

    def _carry(self, address: Address, mean: Tensor) -> None:
        """Notes the mean that an edit wrote at an address; a contribution takes it along into the stream."""
        if address.point in CONTRIBUTIONS:
            self._carried = self._carried + mean - self._written.get(address, 0.0)
        self._written[address] = mean

    def _result_view(self, layer: int) -> View | None:
        """A head's result of the shown z, centred: the value offset's share sits in the output bias that all heads add up to."""
        offset = self._processed.value_offset(layer)
        if offset is None and not self._on.centre_writing:
            return None
        shift: Tensor | float = 0.0
        if offset is not None:
            per_head = self._processed.per_query_head(offset)
            shift = torch.einsum("hd,hdm->hm", per_head, self._processed.engine.weights("o", layer))
        if not self._on.centre_writing:
            return (lambda x: x - shift), (lambda shown: shown + shift)

        def take(shown: Tensor) -> Tensor:
            self._carry(Address("attn_out_post", layer), shown.sum(-2).mean(-1, keepdim=True))
            return shown + shift

        return (lambda x: centred(x - shift)), take

    def _normalized_view(self, address: Address) -> View:
        """Folded reading weights are centred over D, so a mean that is written here shows but reaches nothing but a gate."""

        once_more = address.layer is None  # the unembedding's input is the same value, shown once more

        def show(x: Tensor) -> Tensor:
            return x + self._written.get(address, 0.0) if once_more else x

        def take(shown: Tensor) -> Tensor:
            mean = shown.mean(-1, keepdim=True)
            if once_more or address.point == "mlp_norm_normalized":
                self._written[address] = mean
            return shown - mean

        return show, take

    def companions(self, tapped: Iterable[Address]) -> tuple[list[Tap], list[Tap]]:
        """Taps that must run (before, after) the user's where an edited pattern's rows may not sum to one.

        There sum_k p_k (v_k - c) is z - c * sum_k p_k, not z - c, so z takes up c for what the rows lack.
        """
        before, after = [], []
        if self._on.centre_writing and self._processed.engine.facts.embed_norm:
            before.append(Tap(Address("embeddings"), self._begin_stream, reads=True))
        tapped, facts = set(tapped), self._processed.engine.facts
        if self._on.fold_norm and facts.norm == "layer" and facts.gated_mlp:
            edited = [a for a in tapped if a.point == "mlp_norm_normalized"]
            before += [Tap(Address("mlp_pre", a.layer), lambda gate, at=a: self._let_mean_through(at, gate)) for a in edited]
        for layer in {a.layer for a in tapped if a.point in ("attn_scores", "attn_probs")}:
            offset = self._processed.value_offset(layer)
            if offset is not None:
                per_head = self._processed.per_query_head(offset)
                after.append(Tap(Address("attn_probs", layer), lambda p, at=layer: self._note_row_sums(at, p), reads=True))
                before.append(Tap(Address("z", layer), lambda z, at=layer, c=per_head: self._restore(at, z, c)))
        return before, after

    def _begin_stream(self, embeddings: Tensor) -> None:
        self._take_stream(embeddings)

    def _let_mean_through(self, address: Address, gate: Tensor) -> Tensor:
        """The folded gate is not centred, so it does read the mean that an edit wrote to its normalized input."""
        read = self._processed.weight("mlp_gate", address.layer).sum(0)
        return gate + self._written.pop(address, 0.0) * read.to(gate)

    def _note_row_sums(self, layer: int, pattern: Tensor) -> None:
        self._row_sums[layer] = pattern.sum(-1).transpose(1, 2)[..., None]  # [b, p, H, 1]

    def _restore(self, layer: int, z: Tensor, offset: Tensor) -> Tensor:
        return z + offset.to(z) * (1 - self._row_sums.pop(layer))
