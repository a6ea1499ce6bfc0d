"""What an engine takes, and how it proves on the very checkpoint that its points are where it thinks they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.eager import engine as eager
from engine.eager import resolve, roles
from engine.eager.engine import EagerEngine
from engine.eager.load import load_eager
from engine.errors import LoadFailed, Refused
from engine.points import POINTS, Address
from engine.seam import Batch
from engine.taps import Tap
from tests import hub
from tests.engine import tiny

LLAMA, GPT2, PYTHIA, QWEN = "meta-llama/Llama-3.2-1B", "gpt2", "EleutherAI/pythia-70m", "Qwen/Qwen3-0.6B"
MHA = "llama with biases"


# --- faults, planted in what was resolved -----------------------------------------------------------------------------


def swap(parts: dict[str, Any], a: str, b: str) -> None:
    parts[a], parts[b] = parts[b], parts[a]


def every_layer(change: Callable[[resolve.Layer], None]) -> Callable[[resolve.Tree], None]:
    return lambda tree: [change(layer) for layer in tree.layers] and None


def by_head(layer: resolve.Layer) -> None:
    layer.layout = roles.QKV_LAYOUTS["query_key_value"]


def in_blocks(layer: resolve.Layer) -> None:
    layer.layout = roles.QKV_LAYOUTS["c_attn"]


def off_eps(layer: resolve.Layer) -> None:
    layer.norms["attn_norm"].eps = 0.1


def centred(layer: resolve.Layer) -> None:
    layer.norms["mlp_norm"].kind = "layer"


def off_gain(layer: resolve.Layer) -> None:
    layer.norms["attn_post_norm"].offset = 0.0


def off_final_eps(tree: resolve.Tree) -> None:
    tree.final_norm.eps = 0.1


def first_block_twice(tree: resolve.Tree) -> None:
    tree.layers[1] = copy.copy(tree.layers[0])
    tree.layers[1].index = 1


# what is wrong -> (family, the fault, the points that must then be refused, or None where the model must be)
FAULTS: dict[str, tuple[str, Callable[[resolve.Tree], Any], set[str] | None]] = {
    "q and k swapped": (MHA, every_layer(lambda x: swap(x.parts, "q", "k")), {"q", "k", "q_input", "k_input"}),
    "q and k swapped, sizes differ": (
        LLAMA,
        every_layer(lambda x: swap(x.parts, "q", "k")),
        {"q", "k", "q_input", "k_input"},
    ),
    "k and v swapped": (LLAMA, every_layer(lambda x: swap(x.parts, "k", "v")), {"k", "value", "k_input", "v_input"}),
    "gate and up swapped": (LLAMA, every_layer(lambda x: swap(x.parts, "gate", "up")), {"mlp_pre", "mlp_pre_linear"}),
    "up where down is": (GPT2, every_layer(lambda x: swap(x.parts, "up", "down")), None),
    "fused q, k, v split by head": (GPT2, every_layer(by_head), {"q", "k", "value", "q_input", "k_input", "v_input"}),
    "fused q, k, v split in blocks": (
        PYTHIA,
        every_layer(in_blocks),
        {"q", "k", "value", "q_input", "k_input", "v_input"},
    ),
    "the q norm and the k norm swapped": (QWEN, every_layer(lambda x: swap(x.norms, "q_norm", "k_norm")), {"q", "k"}),
    "a wrong eps": (LLAMA, every_layer(off_eps), {"attn_norm_scale", "attn_norm_normalized", "q_input", "v_input"}),
    "an RMS norm that is thought to centre": (
        LLAMA,
        every_layer(centred),
        {"mlp_norm_scale", "mlp_norm_normalized", "mlp_stream_in"},
    ),
    "a gain that is thought to be the weight": (tiny.GEMMA_2, every_layer(off_gain), {"attn_post_norm_normalized"}),
    "the norms before attention and MLP swapped": (
        LLAMA,
        every_layer(lambda x: swap(x.norms, "attn_norm", "mlp_norm")),
        {"attn_norm_scale"},
    ),
    "post-norm and pre-norm swapped": (
        tiny.GEMMA_2,
        every_layer(lambda x: swap(x.norms, "attn_post_norm", "mlp_norm")),
        None,
    ),
    "the post-norms swapped": (
        tiny.GEMMA_2,
        every_layer(lambda x: swap(x.norms, "attn_post_norm", "mlp_post_norm")),
        None,
    ),
    "post-norms that nobody saw": (tiny.GEMMA_2, every_layer(lambda x: x.norms.pop("attn_post_norm")), None),
    "a wrong eps of the final norm": (LLAMA, off_final_eps, None),
    "one block taken for another": (GPT2, first_block_twice, None),
    "a parallel block taken for a sequential one": (
        PYTHIA,
        every_layer(lambda x: setattr(x, "parallel", False)),
        {"resid_mid"},
    ),
    "a sequential block taken for a parallel one": (
        LLAMA,
        every_layer(lambda x: setattr(x, "parallel", True)),
        {"mlp_norm_scale"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_at_load(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant, due = FAULTS[fault]

    def resolve_wrongly(model: nn.Module, config: Any) -> resolve.Tree:
        tree = resolve.resolve(model, config)
        plant(tree)
        return tree

    monkeypatch.setattr(eager, "resolve", resolve_wrongly)
    if due is None:
        with pytest.raises(LoadFailed, match="does not fit the table of roles: "):
            tiny.new_engine(name)
        return
    engine = tiny.new_engine(name)
    for point in due:
        address = Address(point, 1)
        reason = engine.refuses(address, "read")
        assert reason is not None and reason.startswith("on this checkpoint") and "does not hold" in reason, point
        with pytest.raises(Refused, match="does not hold"):
            engine.run(Batch(torch.tensor([[1, 2]])), [Tap(address, lambda x: x)])
    assert engine.refuses(Address("resid_post", 1), "write") is None


def test_a_sound_model_has_every_point_proved(engine: EagerEngine) -> None:
    reasons = [engine.refuses(Address(p.name, 0 if p.layered else None), "read") for p in POINTS.values()]
    assert not [reason for reason in reasons if reason and reason.startswith("on this checkpoint")]


def test_an_explicit_attention_that_lacks_something_refuses_what_lies_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.eager import attention

    real = attention.explicit_attention
    monkeypatch.setattr(attention, "explicit_attention", lambda *args, softcap, **kwargs: real(*args, **kwargs))
    engine = tiny.new_engine(tiny.GEMMA_2)
    for point in ("q_rot", "k_rot", "attn_scores", "attn_probs"):
        assert "the explicit attention gives the checkpoint's own logits" in engine.refuses(Address(point, 0), "read")
    assert engine.refuses(Address("q", 0), "read") is None


# --- families that are not known --------------------------------------------------------------------------------------


def renamed(name: str, change: Callable[[nn.Module], None]) -> nn.Module:
    model = tiny.hf_model(name)
    change(model)
    return model


def move(owner: nn.Module, old: str, new: str) -> None:
    owner._modules[new] = owner._modules.pop(old)


ODD: dict[str, tuple[Callable[[nn.Module], None], tuple[str, ...]]] = {
    "attention under another name": (
        lambda m: [move(block, "self_attn", "gaze") for block in m.model.layers],
        (
            "cannot resolve attn in LlamaDecoderLayer",
            "looked for self_attn, attn, attention",
            "it has mlp, input_layernorm",
            "gaze",
        ),
    ),
    "projections under other names": (
        lambda m: [move(block.self_attn, "q_proj", "query") for block in m.model.layers],
        ("cannot resolve qkv or q, k and v in LlamaAttention", "q_proj", "query"),
    ),
    "an MLP without a down projection": (
        lambda m: [move(block.mlp, "down_proj", "back") for block in m.model.layers],
        ("cannot resolve down in LlamaMLP", "looked for down_proj, c_proj", "back"),
    ),
    "one norm too many": (
        lambda m: [block.add_module("extra_norm", nn.LayerNorm(96)) for block in m.model.layers],
        ("LlamaDecoderLayer has the norms ['extra_norm', 'input_layernorm', 'post_attention_layernorm']", "known:"),
    ),
    "a list of blocks of another length": (
        lambda m: setattr(m.config, "num_hidden_layers", 5),
        ("cannot resolve a list of 5 blocks in LlamaForCausalLM", "looked for layers, h"),
    ),
    "no final norm": (lambda m: move(m.model, "norm", "finish"), ("cannot resolve final_norm in LlamaModel", "finish")),
    "a norm that is none": (
        lambda m: setattr(m.model, "norm", Tripled(96)),
        ("Tripled is neither gain * x / scale + bias nor",),
    ),
}


class Tripled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * 3


@pytest.mark.parametrize("oddity", ODD)
def test_a_model_that_cannot_be_resolved_is_refused_with_what_was_sought_and_found(oddity: str) -> None:
    change, said = ODD[oddity]
    with pytest.raises(LoadFailed) as caught:
        EagerEngine(renamed(LLAMA, change))
    assert all(part in str(caught.value) for part in said), str(caught.value)


# --- what an engine takes ---------------------------------------------------------------------------------------------


def test_a_hub_id_a_local_folder_and_a_loaded_model_are_the_same_model(tiny_hub: Any) -> None:
    batch = Batch(tiny.prompts(300))
    by_id, by_folder = load_eager(LLAMA), load_eager(str(hub.local_folder(LLAMA)))
    by_model = load_eager(LLAMA, hf_model=tiny.hf_model(LLAMA))
    logits = [engine.run(batch, ()) for engine in (by_id, by_folder, by_model)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert all(engine.tokenizer is not None for engine in (by_id, by_folder, by_model))
    assert by_id.facts.model_id == LLAMA and by_id.facts.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_prove_every_point_and_stay_in_their_dtype(name: str, dtype: torch.dtype) -> None:
    engine, exact = tiny.new_engine(name, dtype), tiny.hf_model(name, dtype)
    batch = Batch(tiny.prompts(engine.facts.d_vocab))
    assert engine.facts.dtype == dtype
    test_a_sound_model_has_every_point_proved(engine)
    with torch.no_grad():
        assert torch.equal(engine.run(batch, ()), exact(batch.tokens).logits)


@pytest.mark.parametrize("name", tiny.FEW)
def test_an_edit_in_bfloat16_is_the_edit_in_float32_rounded(name: str, engine: EagerEngine) -> None:
    half, batch = tiny.new_engine(name, torch.bfloat16), Batch(tiny.prompts(engine.facts.d_vocab))
    for address in [a for a in tiny.addresses(engine, ("tokens",)) if a.layer in (None, 1)]:
        edited = half.run(batch, [Tap(address, lambda x: x * 1.5)])
        truth = engine.run(batch, [Tap(address, lambda x: x * 1.5)])
        assert edited.dtype == torch.bfloat16 and tiny.worst(edited.float(), truth) < 6e-2, address


def test_a_loaded_model_keeps_its_weights_when_the_engines_are_edited(name: str) -> None:
    model = tiny.hf_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    engine = load_eager(name, hf_model=model)
    batch, weights = Batch(tiny.prompts(engine.facts.d_vocab)), engine.weights
    plain = engine.run(batch, ())
    weights.write("o", 1, torch.zeros_like(weights("o", 1)))
    weights.write("unembed", None, weights("unembed") * 2)
    seen = tiny.read(engine, batch, [Address("attn_out", 1), Address("lm_head"), Address("final_norm")])
    out, lm_head, final_norm = (seen[a] for a in (Address("attn_out", 1), Address("lm_head"), Address("final_norm")))
    assert torch.equal(out, weights("o_bias", 1).expand_as(out))
    assert tiny.worst(lm_head, final_norm @ weights("unembed")) < 2e-5
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(batch.tokens).logits, plain)


def test_every_weight_that_is_written_reads_back_and_moves_the_logits(name: str) -> None:
    engine = tiny.new_engine(name)
    batch, facts = Batch(tiny.prompts(engine.facts.d_vocab)), engine.facts
    names = ["embed", "pos_embed", "unembed", "unembed_bias", "final_norm_gain", "final_norm_bias"]
    layered = ["q", "k", "v", "o", "mlp_in", "mlp_gate", "mlp_out"]
    layered += [f"{n}_bias" for n in layered]
    layered += [f"{n}_{p}" for n in ("attn_norm", "mlp_norm", "attn_post_norm", "q_norm") for p in ("gain", "bias")]
    for weight, layer in [(n, None) for n in names] + [(n, 1) for n in layered]:
        if not engine.weights.has(weight, layer):
            continue
        before, value = engine.run(batch, ()), engine.weights(weight, layer)
        other = value * 1.5 + 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(4))
        if weight.endswith("norm_bias") and facts.norm == "rms":
            with pytest.raises(Refused, match="no bias that could hold this edit"):
                engine.weights.write(weight, layer, other)
            continue
        others = {n: engine.weights(n, 1).clone() for n in ("q", "k", "v", "o", "mlp_in", "mlp_out")}
        engine.weights.write(weight, layer, other)
        assert tiny.worst(engine.weights(weight, layer), other) < 1e-6, weight
        assert all(torch.equal(engine.weights(n, 1), kept) for n, kept in others.items() if n != weight), weight
        moved = tiny.worst(engine.run(batch, ()), before) > 1e-5
        assert moved or weight == "k_bias", weight  # a bias of all keys alike may shift every score alike


def with_adapter(name: str, targets: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(tiny.hf_model(name), LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return model.eval()


ADAPTED = {
    LLAMA: ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    GPT2: ["c_attn", "c_proj", "c_fc"],
    PYTHIA: ["query_key_value", "dense", "dense_4h_to_h"],
}


@pytest.mark.parametrize("name", ADAPTED)
def test_a_model_with_an_adapter_gives_the_adapters_numbers(name: str) -> None:
    model = with_adapter(name, ADAPTED[name])
    batch = Batch(tiny.prompts(300))
    with torch.no_grad():
        expected = model(input_ids=batch.tokens).logits
        plain = tiny.hf_model(name)(batch.tokens).logits
        merged = EagerEngine(copy.deepcopy(model).merge_and_unload())
    engine = EagerEngine(model)
    test_a_sound_model_has_every_point_proved(engine)
    assert torch.equal(engine.run(batch, ()), expected) and tiny.worst(plain, expected) > 1e-2
    at = tiny.addresses(engine)
    seen, truth = tiny.read(engine, batch, at), tiny.read(merged, batch, at)
    assert {str(a): e for a in at if (e := tiny.worst(seen[a], truth[a])) > 2e-5} == {}
    for weight in ("q", "k", "v", "o", "mlp_in", "mlp_out"):
        assert tiny.worst(engine.weights(weight, 1), merged.weights(weight, 1)) < 1e-5, weight


def test_a_weight_of_an_adapted_model_is_not_written(tiny_hub: Any) -> None:
    from peft import LoraConfig

    inside = tiny.hf_model(LLAMA)
    inside.add_adapter(
        LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    )  # the class stays Llama's own
    for model in (with_adapter(LLAMA, ["q_proj"]), inside):
        engine = EagerEngine(model)
        value = engine.weights("q", 0)
        with pytest.raises(Refused, match="merge the adapter first"):
            engine.weights.prepare_writing()
        with pytest.raises(Refused, match="merge the adapter first"):
            engine.weights.write("q", 0, value * 2)
        assert torch.equal(engine.weights("q", 0), value)


@pytest.mark.parametrize("name", hub.NAMES)
@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_a_device_map_is_taken(device_map: Any, reference: Any, name: str) -> None:
    own = {"attn_implementation": "eager"} if name == tiny.GEMMA_2 else {}
    engine = load_eager(name, device_map=device_map, **own)
    batch = Batch(tiny.prompts(engine.facts.d_vocab))
    with torch.no_grad():
        assert torch.equal(engine.run(batch, ()), reference(batch.tokens).logits)


def test_modules_that_accelerate_has_wrapped_keep_their_wrapping(name: str) -> None:
    from accelerate import dispatch_model

    model = dispatch_model(tiny.hf_model(name), {"": "cpu"}, main_device="cpu", force_hooks=True)
    wrapped = tiny.hooks_on(model)
    engine = EagerEngine(model)
    batch = Batch(tiny.prompts(engine.facts.d_vocab))
    plain = engine.run(batch, ())
    taps = [Tap(address, lambda x: x.clone()) for address in tiny.addresses(engine, tiny.BRANCHES)]
    assert wrapped > 0 and tiny.worst(engine.run(batch, taps), plain) < 4e-6
    assert torch.equal(engine.run(batch, (), start=(1, engine.run(batch, (), stop=1))), plain)
    assert tiny.hooks_on(model) == wrapped


def test_weights_that_are_not_in_memory_are_refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(LLAMA))
    with pytest.raises(LoadFailed, match="no weight in memory"):
        EagerEngine(model)


def test_two_engines_on_one_model_do_not_disturb_each_other(name: str) -> None:
    model = tiny.hf_model(name)
    first, second = EagerEngine(model), EagerEngine(model)
    batch, seen = Batch(tiny.prompts(first.facts.d_vocab)), []
    plain = first.run(batch, ())
    nested = Tap(Address("resid_post", 1), lambda x: seen.append(second.run(batch, ())))
    assert torch.equal(first.run(batch, [nested]), plain) and torch.equal(seen[0], plain)
    assert torch.equal(
        second.run(batch, [Tap(Address("attn_probs", 0), lambda x: None)], stop=0), first.run(batch, (), stop=0)
    )


def test_a_copy_of_a_configuration_that_an_engine_took_over_still_loads(reference: Any, name: str) -> None:
    from transformers import AutoModelForCausalLM

    taken = tiny.new_engine(name).model
    again = AutoModelForCausalLM.from_config(taken.config).eval()
    again.load_state_dict(taken.state_dict())
    batch = Batch(tiny.prompts(taken.config.vocab_size))
    with torch.no_grad():
        assert tiny.worst(EagerEngine(again).run(batch, ()), reference(batch.tokens).logits) < 2e-5
