"""The small tools against TransformerLens': the same names, the same parameters, and results equal bit for bit."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformer_lens
import transformer_lens.utilities as theirs
from datasets import Dataset
from transformers import AutoTokenizer

from compat.tlens import utilities as ours
from compat.tlens.FactoredMatrix import FactoredMatrix

PACKAGE, OURS = "transformer_lens.utilities", "compat.tlens.utilities"
SUBMODULES = [module.name for module in pkgutil.iter_modules(theirs.__path__)]
NAMES_OF_2_16 = """
    select_compatible_kwargs download_file_from_hf clear_huggingface_cache print_gpu_mem get_corner to_numpy
    lm_cross_entropy_loss lm_accuracy gelu_new gelu_fast gelu_pytorch_tanh solu calc_fan_in_and_fan_out
    init_xavier_uniform_ init_xavier_normal_ init_kaiming_uniform_ init_kaiming_normal_ keep_single_column
    tokenize_and_concatenate sample_logits Slice SliceInput get_act_name remove_batch_dim test_prompt transpose
    composition_scores get_dataset is_square is_lower_triangular check_structure get_device
    override_or_use_default_value USE_DEFAULT_VALUE get_offset_position_ids get_cumsum_along_dim get_attention_mask
    repeat_along_head_dimension get_nested_attr set_nested_attr LocallyOverridenDefaults get_tokenizer_with_bos
    get_input_with_manually_prepended_bos get_tokens_with_bos_removed CACHE_DIR
""".split()

BRIDGE = "it serves TransformerBridge alone, and its names are refused"
LOADING = "it patches classes of other libraries for TransformerBridge's loading"
LEFT_OUT_MODULES = dict.fromkeys(
    ("aliases", "architectures", "bridge_components", "heterogeneous_config", "quantization", "tracr"), BRIDGE
)
LEFT_OUT = {
    "hf_utils.autoconfig_with_remote_post_init_compat": LOADING,
    "hf_utils.autotokenizer_with_special_token_compat": LOADING,
    "hf_utils.enable_hf_numeric_tower": LOADING,
    "hf_utils.make_post_init_kwarg_tolerant": LOADING,
    "multi_gpu.cast_floating_params_to_dtype": LOADING,
    "multi_gpu.maybe_cast_floating_params": LOADING,
    "multi_gpu.find_misplaced_modules": LOADING,
}


IMPORTED = {"HF_HUB_CACHE", "TYPE_CHECKING"}  # plain values, which do not tell where they come from


def exported(module: ModuleType) -> set[str]:
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name for name, value in public.items() if not isinstance(value, ModuleType)}


def own_names(module: ModuleType) -> list[str]:
    """What a module defines or names itself: no imports from elsewhere, no private names."""
    home = {name: getattr(getattr(module, name), "__module__", module.__name__) for name in exported(module) - IMPORTED}
    return sorted(name for name, defined_in in home.items() if defined_in == module.__name__)


def test_every_public_name_of_the_package_is_here() -> None:
    assert exported(theirs) <= set(ours.__all__)


def test_every_name_of_both_eras_is_in_utils() -> None:
    new, old = (importlib.import_module(f"{package}.utils") for package in ("compat.tlens", "transformer_lens"))
    wanted = exported(old) | set(old.__all__) | set(NAMES_OF_2_16)
    assert not [name for name in wanted if not hasattr(new, name)]


@pytest.mark.parametrize("name", SUBMODULES)
def test_every_name_of_a_submodule_is_here_or_left_out_with_a_reason(name: str) -> None:
    their_module, our_module = (importlib.import_module(f"{package}.{name}") for package in (PACKAGE, OURS))
    if name in LEFT_OUT_MODULES:
        return
    missing = {f"{name}.{wanted}" for wanted in own_names(their_module) if not hasattr(our_module, wanted)}
    assert missing == {left for left in LEFT_OUT if left.startswith(name + ".")}


def functions() -> list[str]:
    return [
        f"{module}.{name}"
        for module in SUBMODULES
        if module not in LEFT_OUT_MODULES
        for name in own_names(importlib.import_module(f"{PACKAGE}.{module}"))
        if inspect.isfunction(getattr(importlib.import_module(f"{PACKAGE}.{module}"), name))
        and f"{module}.{name}" not in LEFT_OUT
    ]


@pytest.mark.parametrize("path", functions())
def test_parameters_are_those_of_the_original(path: str) -> None:
    module, name = path.split(".")
    wanted, found = (
        [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]
        for function in (getattr(importlib.import_module(f"{package}.{module}"), name) for package in (PACKAGE, OURS))
    )
    if name == "download_file_from_hf":  # the hub's cache folder is asked for at the call: None means it
        wanted = [(n, None if n == "cache_dir" else default, kind) for n, default, kind in wanted]
    assert found == wanted


# --- names


SHORT_NAMES = """
    embed pos_embed k q v z rot_k rot_q result pattern attn attn_scores attn_logits key query value pre post mid
    pre_linear mlp_pre mlp_mid mlp_post resid_pre resid_mid resid_post attn_out mlp_out scale normalized k6 q0 v12 z3a
    pattern4attn pre5 post7m scale4ln1 normalized27ln2 scale3 resid_pre5 attn_scores2 attn3 key3 mlp_post4 q_input3
    result2 hook_k hook_embed blocks.3.hook_resid_pre ln_final.hook_scale attn_in mlp_in scale2ln_final tokens
""".split()


@pytest.mark.parametrize("layer", [None, 0, 6, -1, "7"])
@pytest.mark.parametrize("layer_type", [None, "a", "attn", "attention", "m", "mlp", "b", "block", "blocks", "ln1", ""])
def test_short_names_become_the_same_full_names(layer: int | str | None, layer_type: str | None) -> None:
    for name in SHORT_NAMES:
        assert ours.get_act_name(name, layer, layer_type) == theirs.get_act_name(name, layer, layer_type)


# --- numbers


def same(name: str, *args: Any, **kwargs: Any) -> None:
    """Both functions of that name give equal results on copies of the arguments, from the same random state."""
    results = []
    for module in (ours, theirs):
        torch.manual_seed(11)
        copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        home = importlib.import_module(f"{module.__name__}.{SUBMODULE[name]}") if name in SUBMODULE else module
        results.append(getattr(home, name)(*copies, **kwargs))
    found, wanted = results
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert torch.equal(found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
    else:
        assert found == wanted


SUBMODULE = {
    "gelu_pytorch_tanh": "activation_functions",
    "xielu": "activation_functions",
    "relu2": "activation_functions",
    "batch_addmm": "addmm",
    "simple_attn_linear": "attention",
    "complex_attn_linear": "attention",
}
LOGITS = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
SEEN = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "solu", "gelu_pytorch_tanh", "xielu", "relu2"])
def test_activations_are_identical(name: str, dtype: torch.dtype) -> None:
    same(name, LOGITS.to(dtype))


def test_the_table_of_activations_is_the_same() -> None:
    assert list(ours.SUPPORTED_ACTIVATIONS) == list(theirs.SUPPORTED_ACTIVATIONS)
    for name, function in ours.SUPPORTED_ACTIVATIONS.items():
        assert torch.equal(function(LOGITS), theirs.SUPPORTED_ACTIVATIONS[name](LOGITS))


def test_the_trainable_xielu_has_the_same_parameters_and_values() -> None:
    mine, yours = (importlib.import_module(f"{p}.activation_functions").XIELU() for p in (OURS, PACKAGE))
    mine.load_state_dict(yours.state_dict())
    assert torch.equal(mine(LOGITS), yours(LOGITS))
    for (name, a), (_, b) in zip(type(mine)().state_dict().items(), yours.state_dict().items()):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("cap", [None, -1.0, 0, 2.5])
def test_soft_caps_are_identical(cap: float | None) -> None:
    same("apply_softcap", LOGITS, cap)
    same("softcap_enabled", cap)


SAMPLING = [
    dict(zip(("temperature", "freq_penalty", "repetition_penalty"), values)) | cut
    for values in itertools.product((0.0, 0.7, 1.0), (0.0, 0.4), (1.0, 1.3))
    for cut in ({}, {"top_k": 1}, {"top_k": 7}, {"top_k": 500}, {"top_p": 0.3}, {"top_p": 1.0})
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", SAMPLING, ids=str)
def test_seeded_sampling_gives_the_same_ids(settings: dict[str, float], dtype: torch.dtype) -> None:
    same("sample_logits", LOGITS.to(dtype), tokens=SEEN, **settings)


def test_sampling_leaves_the_same_random_state() -> None:
    states = []
    for module in (ours, theirs):
        torch.manual_seed(5)
        module.sample_logits(LOGITS, top_p=0.8)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("bad", [{"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"freq_penalty": 1.0}], ids=str)
def test_sampling_refuses_what_the_original_refuses(bad: dict[str, float]) -> None:
    for module in (theirs, ours):
        with pytest.raises(AssertionError):
            module.sample_logits(LOGITS, **bad)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, None])
def test_losses_are_identical(per_token: bool, dtype: torch.dtype | None) -> None:
    logits, tokens = LOGITS.view(2, 2, 50), SEEN[:2, :2]
    logits, tokens = torch.cat([logits, logits.flip(-1)], dim=1), torch.cat([tokens, tokens + 1], dim=1) % 50
    mask = None if dtype is None else torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]).to(dtype)
    same("lm_cross_entropy_loss", logits, tokens, mask, per_token)
    same("lm_accuracy", logits, tokens, per_token)


def test_tables_of_logits_are_identical() -> None:
    import pandas as pd

    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    for arguments in ({}, {"top_k": 5}, {"tokenizer": tokenizer, "top_k": 4}):
        found, wanted = (module.logits_to_df(LOGITS[0], **arguments) for module in (ours, theirs))
        pd.testing.assert_frame_equal(found, wanted)


@pytest.mark.parametrize("shape", [(7,), (7, 5), (3, 7, 5)], ids=str)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("init_xavier_uniform_", {"gain": 1.7}),
        ("init_xavier_normal_", {}),
        ("init_kaiming_uniform_", {"nonlinearity": "leaky_relu", "a": 0.2}),
        ("init_kaiming_uniform_", {"mode": "fan_out"}),
        ("init_kaiming_normal_", {"nonlinearity": "linear", "gain": 0.5}),
    ],
)
def test_seeded_initialisations_are_identical(name: str, more: dict[str, Any], shape: tuple[int, ...]) -> None:
    same(name, torch.empty(shape), **more)
    same("calc_fan_in_and_fan_out", torch.empty(shape))


@pytest.mark.parametrize("shape", [(), (2, 3, 4, 5)], ids=str)
def test_shapes_without_a_fan_are_refused(shape: tuple[int, ...]) -> None:
    for module in (theirs, ours):
        with pytest.raises(ValueError):
            module.calc_fan_in_and_fan_out(torch.empty(shape))


TENSOR = LOGITS[:, :48].reshape(2, 4, 4, 6)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("get_corner", (TENSOR,)),
        ("get_corner", (TENSOR, 2)),
        ("remove_batch_dim", (TENSOR,)),
        ("remove_batch_dim", (TENSOR[:1],)),
        ("transpose", (TENSOR,)),
        ("is_square", (TENSOR[0, 0],)),
        ("is_square", (TENSOR[0, 0, :, :4],)),
        ("is_lower_triangular", (TENSOR[0, 0, :, :4],)),
        ("is_lower_triangular", (TENSOR[0, 0, :, :4].tril(),)),
        ("get_cumsum_along_dim", (TENSOR, 1)),
        ("get_cumsum_along_dim", (TENSOR, -1, True)),
        ("get_offset_position_ids", (0, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))),
        ("get_offset_position_ids", (2, torch.tensor([[0, 0, 1, 1], [1, 0, 1, 1]]))),
        ("repeat_along_head_dimension", (TENSOR[0], 3)),
        ("repeat_along_head_dimension", (TENSOR[0], 3, False)),
        ("filter_dict_by_prefix", ({"a.b.c": 1, "a.bc": 2, "a.b.d.e": 3}, "a.b")),
        ("filter_dict_by_prefix", ({"a.b.c": 1, "a.bc": 2}, "a.b.")),
        ("to_numpy", (TENSOR.bfloat16(),)),
        ("to_numpy", ([1, 2, 3],)),
        ("to_numpy", ((True, False),)),
        ("to_numpy", (2.5,)),
        ("to_numpy", (torch.tensor(3),)),
        ("override_or_use_default_value", (True, False)),
        ("override_or_use_default_value", (True, None)),
        ("batch_addmm", (LOGITS[0, :5], LOGITS[1, :30].view(6, 5), TENSOR)),
        ("simple_attn_linear", (TENSOR[0], LOGITS[:3, :30].view(3, 6, 5), LOGITS[:3, :5])),
        ("complex_attn_linear", (TENSOR[:, :, :3], LOGITS[:3, :30].view(3, 6, 5), LOGITS[:3, :5])),
    ],
)
def test_functions_of_tensors_are_identical(name: str, args: tuple) -> None:
    same(name, *args)


SLICES = [None, 2, -1, (3,), (1, 4), (1, 5, 2), [0, 2, 2], torch.tensor([1, 3]), np.array([4]), slice(2, None)]


@pytest.mark.parametrize("value", SLICES, ids=str)
def test_slices_are_identical(value: Any) -> None:
    mine, yours = ours.Slice(value), theirs.Slice(value)
    assert mine.mode == yours.mode and repr(mine) == repr(yours)
    for dim in (0, 1, -1):
        tensor = torch.arange(6 * 6 * 6).view(6, 6, 6)
        assert torch.equal(mine.apply(tensor, dim), yours.apply(tensor, dim))
    found, wanted = mine.indices(6), yours.indices(6)
    assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
    assert repr(ours.Slice.unwrap(value)) == repr(theirs.Slice.unwrap(value))
    assert ours.Slice.unwrap(mine) is mine


@pytest.mark.parametrize("wrong", ["2", 1.5, {1}])
def test_what_is_no_slice_is_refused(wrong: Any) -> None:
    for module in (theirs, ours):
        with pytest.raises(ValueError):
            module.Slice(wrong)
        with pytest.raises(ValueError):
            module.Slice((1, 2)).indices()


@pytest.mark.parametrize("broadcast", [True, False])
def test_composition_scores_are_identical(broadcast: bool) -> None:
    shapes = [(2, 3, 9, 4), (2, 3, 4, 9), (2, 3, 9, 5), (2, 3, 5, 9)]
    torch.manual_seed(2)
    factors = [torch.randn(shape) for shape in shapes]
    scores = []
    for module, matrix in ((ours, FactoredMatrix), (theirs, transformer_lens.FactoredMatrix)):
        left, right = matrix(*factors[:2]), matrix(*factors[2:])
        scores.append(module.composition_scores(left, right, broadcast_dims=broadcast))
        assert module.get_matrix_corner(left, 2).shape == (2, 2, 2, 2)
    assert torch.equal(*scores)


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("change", [[], [(1, 0, 9.0)], [(0, 2, -9.0), (2, 2, 9.0)]], ids=["alike", "a row", "rows"])
def test_structure_checks_print_the_same(change: list, verbose: bool, capsys: pytest.CaptureFixture) -> None:
    first = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    second = first.clone()
    for row, column, value in change:
        second[row, column] = value
    printed = []
    for module in (ours, theirs):
        module.check_structure(first, second, verbose=verbose)
        printed.append(capsys.readouterr().out)
    # TransformerLens calls the columns "rows" too, where it shows them.
    assert printed[0].replace("\tcolumns", "\trows") == printed[1]


# --- tokens


@pytest.fixture(scope="module", params=["gpt2", "google/gemma-2-2b", "meta-llama/Llama-3.2-1B"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """GPT-2's has one token for BOS, EOS and pad, as TransformerLens sets it; Gemma's has three."""
    tokenizer = AutoTokenizer.from_pretrained(request.param)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("prepend_bos", [True, False])
def test_masks_and_removed_bos_are_identical(tokenizer: Any, side: str | None, prepend_bos: bool) -> None:
    texts = [tokenizer.bos_token + text for text in ("A long prompt indeed, of many words.", "Hi", "One two three")]
    tokenizer.padding_side = side or "left"
    tokens = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)["input_ids"]
    tokens[0, 4] = tokenizer.pad_token_id  # a pad in the middle is no padding
    same("get_attention_mask", tokenizer, tokens, prepend_bos, side)
    same("get_attention_mask", None, tokens, prepend_bos, side)
    same("get_tokens_with_bos_removed", tokenizer, tokens, side)


def test_prepended_bos_is_identical(tokenizer: Any) -> None:
    for bos in (tokenizer.bos_token, None):
        same("get_input_with_manually_prepended_bos", bos, "text")
        same("get_input_with_manually_prepended_bos", bos, ["a", "b"])


def test_a_tokenizer_with_bos_is_identical(tokenizer: Any) -> None:
    tokenizer.padding_side = "left"
    mine, yours = ours.get_tokenizer_with_bos(tokenizer), theirs.get_tokenizer_with_bos(tokenizer)
    assert mine.padding_side == yours.padding_side == "left"
    assert mine("Hello world")["input_ids"] == yours("Hello world")["input_ids"]
    assert (mine is tokenizer) == (yours is tokenizer)


def test_a_tokenizer_from_nowhere_raises_the_same_built_in() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    built = Tokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    for module in (theirs, ours):
        with pytest.raises(KeyError, match="name_or_path"):
            module.get_tokenizer_with_bos(PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>"))


@pytest.mark.parametrize("name", ["gpt2", "google/gemma-2-2b"])
@pytest.mark.parametrize("add_bos_token", [True, False])
@pytest.mark.parametrize(("n_texts", "max_length"), [(30, 16), (1, 64), (3, 5)])
def test_rows_of_tokens_are_identical(name: str, add_bos_token: bool, n_texts: int, max_length: int) -> None:
    rows = []
    texts = [f"Text {i} is of some words." * (i % 3 + 1) for i in range(n_texts)]
    for module in (ours, theirs):
        data = Dataset.from_dict({"id": range(n_texts), "text": texts})
        tokenizer = AutoTokenizer.from_pretrained(name)
        done = module.tokenize_and_concatenate(
            data, tokenizer, max_length=max_length, add_bos_token=add_bos_token, num_proc=None
        )
        assert done.column_names == ["tokens"]
        rows.append((done["tokens"][:], tokenizer.pad_token))
    (found, our_pad), (wanted, their_pad) = rows
    assert our_pad == their_pad
    assert found.shape[1] == max_length and found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_a_streamed_data_set_gives_the_same_rows() -> None:
    rows = []
    for module in (ours, theirs):
        data = Dataset.from_dict({"text": ["", "one two", "three " * 20], "other": [1, 2, 3]}).to_iterable_dataset()
        tokenizer = AutoTokenizer.from_pretrained("gpt2")
        done = module.tokenize_and_concatenate(data, tokenizer, streaming=True, max_length=8, set_format=False)
        rows.append([list(row["tokens"]) for row in done])
    assert rows[0] == rows[1] and len(rows[0]) > 1


# --- a model at hand


@pytest.fixture(scope="module")
def model() -> Any:
    return transformer_lens.HookedTransformer.from_pretrained("gpt2", device="cpu")


@pytest.mark.parametrize(
    "settings",
    [
        {"answer": "Mary"},
        {"answer": " Mary Johnson", "top_k": 3},
        {"answer": ["Mary", "John", "store"], "top_k": 4},
        {"answer": ["Mary"], "prepend_space_to_answer": False, "prepend_bos": False},
        {"answer": "Mary", "print_details": False},
    ],
    ids=str,
)
def test_a_tested_prompt_prints_the_same(settings: dict, model: Any, capsys: pytest.CaptureFixture) -> None:
    printed = []
    for module in (ours, theirs):
        module.test_prompt("When Mary and John went to the store, John gave a drink to", model=model, **settings)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "Ranks of the answer tokens" in printed[0]


def test_a_cache_is_as_long_by_both() -> None:
    cache = SimpleNamespace(entries=[SimpleNamespace(past_keys=torch.zeros(2, 5, 3, 4))])
    for package in (OURS, PACKAGE):
        offset = importlib.import_module(f"{package}.cache").get_pos_offset
        assert (offset(cache, 2), offset(None, 2)) == (5, 0)
