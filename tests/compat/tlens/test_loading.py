"""Loading by name, folder or module; what `cfg` says afterwards; and what is said when it cannot be done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from compat.tlens import HookedTransformer
from engine.errors import BadInput, LoadFailed, Refused
from tests import hub

IDS = torch.arange(3, 14)[None]
LLAMA = "meta-llama/Llama-3.2-1B"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of GPT-2's folder, to damage."""
    return Path(shutil.copytree(hub.local_folder("gpt2"), tmp_path / "checkpoint"))


# --- ways in ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "gpt2-small", "GPT2", "openai-community/gpt2"])
def test_name_and_aliases_load_one_model(shared: Any, load: Any, capsys: pytest.CaptureFixture, name: str) -> None:
    if name == "openai-community/gpt2":
        name = hub.local_folder("gpt2")
    capsys.readouterr()
    model = load(name)
    assert capsys.readouterr().out == f"Loaded pretrained model {name} into HookedTransformer\n"
    assert torch.equal(model(IDS), shared("gpt2")(IDS))


@pytest.mark.parametrize("family", hub.NAMES)
def test_local_folder_loads_as_the_name_does(shared: Any, load: Any, family: str) -> None:
    for folder in (hub.local_folder(family), str(hub.local_folder(family))):
        model = load(folder)
        assert torch.equal(model(IDS), shared(family)(IDS))
        assert model.to_tokens("a b").tolist() == shared(family).to_tokens("a b").tolist()


@pytest.mark.parametrize("family", hub.NAMES)
def test_loaded_module_is_taken_as_it_is(shared: Any, load: Any, family: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(family)
    model = load(family, hf_model=theirs)
    assert torch.equal(model(IDS), shared(family)(IDS))
    assert model.engine.model is theirs


def test_loaded_module_in_another_dtype_stays_in_it(load: Any) -> None:
    theirs = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.bfloat16)
    for dtype in ("float32", "bfloat16"):  # float32 is the default, which nobody may have asked for
        model = load("gpt2", hf_model=theirs, dtype=dtype)
        assert model.cfg.dtype == model(IDS).dtype == model.W_E.dtype == torch.bfloat16


def test_module_with_an_adapter_loads(load: Any) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(LLAMA)
    theirs = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, target_modules=["q_proj", "down_proj"]))
    expected = theirs(IDS).logits
    model = load(LLAMA, hf_model=theirs)
    assert torch.allclose(model(IDS), expected - expected.mean(-1, keepdim=True), atol=1e-4)
    with theirs.disable_adapter():
        off = theirs(IDS).logits
        assert torch.allclose(model(IDS), off - off.mean(-1, keepdim=True), atol=1e-4)
    assert not torch.allclose(off, expected, atol=1e-2)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        (torch.float64, torch.float64),
    ],
)
def test_dtype_by_name_or_itself(load: Any, given: Any, dtype: torch.dtype) -> None:
    for options in ({"dtype": given}, {"torch_dtype": given}):
        model = load("gpt2", **options)
        assert model.cfg.dtype == model(IDS).dtype == dtype


def test_default_dtype_is_float32_whatever_the_checkpoint_says(load: Any, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert load(folder).cfg.dtype == torch.float32


def test_first_layers_only(load: Any, shared: Any) -> None:
    for family in ("gpt2", "google/gemma-2-2b"):
        model = load(family, first_n_layers=2)
        assert model.cfg.n_layers == len(model.blocks) == 2
        assert torch.equal(model(IDS, stop_at_layer=2), shared(family)(IDS, stop_at_layer=2))


def test_context_is_shortened_and_rotary_contexts_lengthened(load: Any) -> None:
    short = load("gpt2", n_ctx=8)
    assert short.cfg.n_ctx == 8 and short(IDS[:, :8]).shape[1] == 8
    with pytest.raises(BadInput, match="n_ctx = 8"):
        short(IDS)
    assert load(LLAMA, n_ctx=150)(torch.ones(1, 150, dtype=torch.long)).shape[1] == 150


def test_defaults_of_tokenizing_are_set_at_load(load: Any) -> None:
    model = load("gpt2", default_prepend_bos=False, default_padding_side="left")
    assert model.cfg.default_prepend_bos is False and model.tokenizer.padding_side == "left"
    bos = model.tokenizer.bos_token_id
    ids = model.to_tokens(["a", "a b c"])
    assert ids[0, 0] == model.tokenizer.pad_token_id and ids[0, -1] != bos
    assert model.to_tokens("a")[0, 0] != bos
    assert load("gpt2").to_tokens("a")[0, 0] == bos


def test_tokenizer_of_ones_own(load: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained("EleutherAI/pythia-70m")
    model = load("gpt2", tokenizer=tokenizer)
    assert model.to_tokens("a b", prepend_bos=False).tolist() == [tokenizer("a b")["input_ids"]]


def test_device_by_name_or_itself(load: Any) -> None:
    for device in ("cpu", torch.device("cpu")):
        assert load("gpt2", device=device)(IDS).device.type == "cpu"


@pytest.mark.parametrize("family", hub.NAMES)
def test_no_processing_gives_the_checkpoints_own_numbers(family: str) -> None:
    model = HookedTransformer.from_pretrained_no_processing(family, device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(family, attn_implementation="eager")  # sdpa drops Gemma-2's soft cap
    assert torch.allclose(model(IDS), theirs(IDS).logits, atol=1e-4)
    assert torch.equal(model.W_E[IDS[0]], theirs.get_input_embeddings()(IDS[0])) or "gemma" in family  # Gemma scales
    assert model.cfg.normalization_type in ("LN", "RMS")


def test_config_says_what_the_checkpoint_is(shared: Any) -> None:
    cfg = shared("google/gemma-2-2b").cfg
    expected = dict(
        n_layers=4, d_model=80, n_heads=4, n_key_value_heads=2, d_head=32, d_mlp=208, d_vocab=437, n_ctx=104
    )
    expected |= dict(
        model_name="gemma-2-2b", normalization_type="RMSPre", gated_mlp=True, positional_embedding_type="rotary"
    )
    expected |= dict(
        attn_scores_soft_cap=4.0, output_logits_soft_cap=5.0, use_normalization_before_and_after=True, window_size=6
    )
    assert {name: getattr(cfg, name) for name in expected} == expected
    assert (
        cfg.original_architecture == "Gemma2ForCausalLM"
        and cfg.dtype == torch.float32
        and torch.device(cfg.device).type == "cpu"
    )


# --- what cannot be loaded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [("gpt-2", "'gpt2'"), ("pythia-70", "'pythia-70m'"), ("", "org/name"), ("./no/folder", "local folder")],
)
def test_unknown_name_is_a_value_error_with_the_nearest_names(load: Any, typed: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="unknown model name") as caught:
        load(typed)
    assert isinstance(caught.value, KeyError) and nearest in str(caught.value)


@pytest.mark.parametrize("name", ["somebody/something", "gpt2-xl"])
def test_hub_id_without_a_network_says_what_was_wanted_and_what_to_do(
    load: Any, name: str, capsys: pytest.CaptureFixture
) -> None:
    capsys.readouterr()
    with pytest.raises(OSError, match=f"could not load '{name}'") as caught:
        load(name)
    assert isinstance(caught.value, LoadFailed)
    assert "local folder" in str(caught.value) and "HF_HOME" in str(caught.value)
    assert "Loaded" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["t5-small", "bert-base-cased"])
def test_name_of_no_decoder_is_a_runtime_error(load: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match="no decoder"):
        load(name)


def weights_of(folder: Path) -> Path:
    return folder / "model.safetensors"


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(weights_of(folder))
    edit(tensors)
    save_file(tensors, weights_of(folder), metadata={"format": "pt"})


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "config cut off": lambda folder: (folder / "config.json").write_text('{"model_type": "gp'),
    "unknown architecture": lambda folder: (folder / "config.json").write_text('{"model_type": "nothing"}'),
    "no weights": lambda folder: weights_of(folder).unlink(),
    "empty weights": lambda folder: weights_of(folder).write_bytes(b""),
    "weights cut off in the header": lambda folder: weights_of(folder).write_bytes(
        weights_of(folder).read_bytes()[:500]
    ),
    "weights cut off at the end": lambda folder: weights_of(folder).write_bytes(weights_of(folder).read_bytes()[:-100]),
    "weights that are none": lambda folder: weights_of(folder).write_bytes(b"x" * 1000),
    "a weight of another shape": lambda folder: edit_weights(
        folder, lambda w: w.update({"transformer.wpe.weight": torch.zeros(5, 128)})
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_folder_is_named_with_the_cause(load: Any, folder: Path, kind: str) -> None:
    DAMAGE[kind](folder)
    with pytest.raises(LoadFailed, match="could not load") as caught:
        load(folder)
    assert str(folder) in str(caught.value) and isinstance(caught.value, OSError)
    assert caught.value.__cause__ is not None


def drop_a_weight(folder: Path) -> None:
    edit_weights(folder, lambda w: w.pop(next(name for name in w if "h.1.attn.c_attn.weight" in name)))


def test_missing_weight_is_refused(load: Any, folder: Path) -> None:
    """transformers would make it up."""
    drop_a_weight(folder)
    with pytest.raises(LoadFailed, match="c_attn"):
        load(folder)


def test_more_layers_than_there_are_is_refused(load: Any) -> None:
    with pytest.raises((LoadFailed, BadInput)):
        load("gpt2", first_n_layers=9)


def test_folder_without_a_tokenizer_serves_ids_but_no_text(load: Any, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    model = load(folder)
    assert model(IDS).shape == (1, 11, 403)
    with pytest.raises(AssertionError, match="tokenizer"):
        model("some text")


def test_options_that_ask_for_another_model_than_hf_model_are_refused(load: Any) -> None:
    theirs = AutoModelForCausalLM.from_pretrained("gpt2")
    with pytest.raises(BadInput, match="hf_model.to"):
        load("gpt2", hf_model=theirs, dtype="bfloat16")
    with pytest.raises(BadInput, match="num_hidden_layers"):
        load("gpt2", hf_model=theirs, first_n_layers=2)
    for other in (nn.Linear(2, 2), "gpt2"):
        with pytest.raises(AssertionError, match="model of transformers"):
            load("gpt2", hf_model=other)


@pytest.mark.parametrize(
    ("options", "builtin", "message"),
    [
        ({"dtype": "float65"}, KeyError, "bfloat16"),
        ({"checkpoint_index": 3}, ValueError, "not checkpointed"),
        ({"checkpoint_value": 7}, ValueError, "not checkpointed"),
        ({"first_n_layers": 0}, AssertionError, "at least 1"),
        ({"n_ctx": 200}, ValueError, "learned 72 positions"),
        ({"default_padding_side": "middle"}, ValueError, "padding_side"),
        ({"load_in_4bit": True}, AssertionError, "Quantization"),
        ({"refactor_factored_attn_matrices": True}, Refused, "FactoredMatrix"),
        ({"tokenizer": "gpt2"}, AssertionError, "tokenizer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_option_that_means_nothing_here_is_refused(
    load: Any, options: dict[str, Any], builtin: type, message: str
) -> None:
    with pytest.raises(builtin, match=message):
        load("gpt2", **options)


def test_checkpoints_of_pythia_are_found_by_value_and_label(load: Any) -> None:
    with pytest.raises(AssertionError, match="Checkpoint value 7"):
        load("pythia-70m", checkpoint_value=7)
    with pytest.raises(IndexError):
        load("pythia-70m", checkpoint_index=9999)
    with pytest.raises(ValueError, match="same thing"):
        load("pythia-70m", checkpoint_value=8, checkpoint_label=8)
    with pytest.raises(LoadFailed, match="pythia-70m"):  # the tiny hub holds the last step only
        load("pythia-70m", checkpoint_value=8)
