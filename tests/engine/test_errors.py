"""What goes wrong is said in one sentence that names what was wanted, and leaves the engine as it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.eager.engine import EagerEngine
from engine.eager.load import load_eager
from engine.errors import BadInput, BadReplacement, CompatError, LoadFailed, Refused, UnknownName
from engine.points import Address
from engine.seam import Batch
from engine.taps import Tap
from tests import hub
from tests.engine import tiny

BATCH = Batch(torch.tensor([[3, 1, 4, 1, 5]]))


@pytest.fixture
def usable(engine: EagerEngine) -> Any:
    """Whatever happened in the test, the engine gives the same numbers after it and has no hooks."""
    plain = engine.run(BATCH, ())
    yield
    assert tiny.hooks_on(engine.model) == 0 and torch.equal(engine.run(BATCH, ()), plain)


@pytest.mark.parametrize("error", [UnknownName, Refused, BadReplacement, BadInput, LoadFailed])
def test_every_error_is_ours_and_the_built_in_that_old_code_catches(error: type[Exception]) -> None:
    assert issubclass(error, CompatError)
    assert issubclass(error, (KeyError, NotImplementedError, ValueError, OSError))


def test_token_ids_out_of_range_are_refused(engine: EagerEngine, usable: None) -> None:
    d_vocab = engine.facts.d_vocab
    for ids in ([3, d_vocab], [-1, 3]):
        with pytest.raises(
            BadInput, match=f"token ids run from {min(ids)} to {max(ids)}; the vocabulary has {d_vocab} entries"
        ):
            engine.run(Batch(torch.tensor([ids])), ())
    assert engine.run(Batch(torch.tensor([[0, d_vocab - 1]])), ()) is not None


def test_token_ids_that_a_tap_puts_in_are_checked_too(engine: EagerEngine, usable: None) -> None:
    with pytest.raises(BadInput, match="token ids run from"):
        engine.run(BATCH, [Tap(Address("tokens"), lambda ids: ids + 10_000)])


def test_a_prompt_beyond_learned_positions_is_refused_and_one_on_rotary_positions_is_not(
    engine: EagerEngine, usable: None
) -> None:
    n_ctx = engine.facts.n_ctx
    longer = Batch(torch.ones(1, n_ctx + 1, dtype=torch.long))
    if engine.facts.positions == "learned":
        with pytest.raises(
            BadInput, match=f"the prompt has {n_ctx + 1} positions, but gpt2 has a context of n_ctx = {n_ctx}"
        ):
            engine.run(longer, ())
        cache = engine.new_cache()
        engine.run(Batch(torch.ones(1, n_ctx, dtype=torch.long)), (), cache=cache)
        with pytest.raises(BadInput, match=f"n_ctx = {n_ctx}"):
            engine.run(Batch(torch.ones(1, 1, dtype=torch.long)), (), cache=cache)
    else:
        assert engine.run(longer, ()).shape[1] == n_ctx + 1


def test_a_mask_of_the_wrong_shape_is_refused(engine: EagerEngine, usable: None) -> None:
    for mask in (torch.ones(1, 4), torch.ones(2, 5), torch.ones(5), torch.ones(1, 1, 5, 5)):
        with pytest.raises(BadInput, match=r"0 cached and 5 new positions need \[1, 5\]"):
            engine.run(Batch(BATCH.tokens, mask), ())
    cache = engine.new_cache()
    engine.run(BATCH, (), cache=cache)
    with pytest.raises(BadInput, match=r"the attention mask is \[1, 2\]; 5 cached and 2 new positions need \[1, 7\]"):
        engine.run(Batch(torch.tensor([[1, 2]]), torch.ones(1, 2)), (), cache=cache)


def test_what_is_no_batch_of_prompts_is_refused(engine: EagerEngine, usable: None) -> None:
    d = engine.facts.d_model
    for batch in (
        Batch(None),
        Batch(torch.tensor([1, 2])),
        Batch(torch.ones(1, 2)),
        Batch(torch.ones(1, 2, 3, dtype=torch.long)),
    ):
        with pytest.raises(BadInput, match=r"a batch has tokens \[batch, pos\] \(whole numbers\); got"):
            engine.run(batch, ())
    for embeds in (torch.ones(2, d), torch.ones(1, 2, d, dtype=torch.long)):
        with pytest.raises(BadInput, match=r"a batch has embeds \[batch, pos, d_model\] \(floats\); got"):
            engine.run(Batch(None, embeds=embeds), ())


WRONG = {
    "list": (lambda x: x.tolist(), "returned list; return a tensor, or None for no change"),
    "number": (lambda x: 0.0, "returned float; return a tensor"),
    "tuple": (lambda x: (x,), "returned tuple; return a tensor"),
    "bool": (lambda x: False, "returned bool; return a tensor"),
    "shape": (lambda x: x[:, :2], "but the value there is"),
    "axis": (lambda x: x[None], "but the value there is"),
    "width": (lambda x: x[..., :1].expand(*x.shape[:-1], x.shape[-1] + 1), "but the value there is"),
    "dtype": (lambda x: x.double(), "float64, but the value there is"),
}


@pytest.mark.parametrize("name", tiny.FEW)
@pytest.mark.parametrize("kind", WRONG)
def test_a_replacement_that_cannot_stand_in_is_refused_with_the_point_what_came_and_what_was_due(
    engine: EagerEngine, usable: None, kind: str
) -> None:
    fn, said = WRONG[kind]
    for address in tiny.addresses(engine):
        if address.layer not in (None, 1):
            continue
        due: list[Tensor] = []

        def answer(x: Tensor, due: list[Tensor] = due) -> object:
            due.append(x)
            return fn(x)

        with pytest.raises(BadReplacement) as caught:
            engine.run(BATCH, [Tap(address, answer)])
        message = str(caught.value)
        assert f"a hook at {address} returned" in message and said in message
        if kind in ("shape", "axis", "width", "dtype"):
            assert f"{list(fn(due[0]).shape)} {str(fn(due[0]).dtype)[6:]}" in message  # what came
            assert f"the value there is {list(due[0].shape)} {str(due[0].dtype)[6:]}" in message  # what was due


def test_a_layer_that_is_not_there_is_refused(engine: EagerEngine, usable: None) -> None:
    n = engine.facts.n_layers
    for layer in (n, -1):
        with pytest.raises(
            Refused, match=f"resid_post.{layer} cannot be served on .*the model has layers 0 to {n - 1}"
        ):
            engine.run(BATCH, [Tap(Address("resid_post", layer), lambda x: x)])


def test_a_weight_that_is_not_there_is_named_with_its_neighbours(engine: EagerEngine) -> None:
    with pytest.raises(UnknownName, match=r"unknown weight 'mlp_int'; the nearest are 'mlp_in'"):
        engine.weights("mlp_int", 0)
    if not engine.facts.gated_mlp:
        with pytest.raises(Refused, match="no weight mlp_gate in layer 0: its MLP is not gated"):
            engine.weights("mlp_gate", 0)
        assert not engine.weights.has("mlp_gate", 0) and engine.weights.has("mlp_in", 0)


# --- loading ----------------------------------------------------------------------------------------------------------


def says_where_to_point(error: LoadFailed, wanted: str) -> bool:
    message = str(error)
    return (
        f"could not load {wanted!r}" in message
        and "a local folder with config.json and weights" in message
        and "HF_HOME" in message
    )


def a_copy(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(hub.local_folder(name), folder / "model"))


def test_a_hub_id_that_is_not_cached_is_refused_offline() -> None:
    with pytest.raises(LoadFailed) as caught:
        load_eager("nobody/never-heard-of-it")
    assert says_where_to_point(caught.value, "nobody/never-heard-of-it")


def test_a_folder_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(LoadFailed) as caught:
            load_eager(str(folder))
        assert says_where_to_point(caught.value, str(folder))


DAMAGE = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "overwritten": lambda path: path.write_bytes(b"not a checkpoint at all" * 100),
    "emptied": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused(damage: str, tmp_path: Path) -> None:
    folder = a_copy("gpt2", tmp_path)
    DAMAGE[damage](folder / "model.safetensors")
    with pytest.raises(LoadFailed) as caught:
        load_eager(str(folder))
    assert says_where_to_point(caught.value, str(folder))


def test_a_damaged_configuration_is_refused(tmp_path: Path) -> None:
    folder = a_copy("gpt2", tmp_path)
    (folder / "config.json").write_text('{"model_type": "gpt')
    with pytest.raises(LoadFailed) as caught:
        load_eager(str(folder))
    assert says_where_to_point(caught.value, str(folder))


def test_a_checkpoint_that_lacks_a_weight_is_refused_and_not_filled_with_noise(tmp_path: Path) -> None:
    """transformers would invent the missing tensor, and say so only in a log."""
    from safetensors.torch import load_file, save_file

    folder = a_copy("gpt2", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadFailed, match=r"transformer\.h\.1\.mlp\.c_fc\.weight"):
        load_eager(str(folder))


def test_a_folder_without_a_tokenizer_loads_without_one(tmp_path: Path) -> None:
    folder = a_copy("gpt2", tmp_path)
    for path in folder.glob("*token*"):
        path.unlink()
    engine = load_eager(str(folder))
    assert engine.tokenizer is None and engine.run(BATCH, ()) is not None
