"""The weights a program reads are TransformerLens' processed ones, and edits of them take effect as they do there."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import Refused
from tests.parity.pairs import Pair, assert_close, assert_same_cache, error, new_pair, random_tokens

BUFFERS = ("attn.mask", "attn.IGNORE", "attn.rotary_sin", "attn.rotary_cos", "act_fn.beta", "act_fn.eps")
STACKED = "W_Q W_K W_V W_O W_in W_gate W_out b_Q b_K b_V b_O b_in b_out W_E W_U b_U".split()
OF_ATTENTION = "W_Q W_K W_V W_O b_Q b_K b_V b_O".split()


def learned(model: Any) -> dict[str, Tensor]:
    """Every weight by name, but for experts', which are refused here, and one that is there for no purpose."""
    refused = r"blocks\.\d+\.mlp\." if model.cfg.num_experts else r"$"
    unused = "pos_embed.W_pos" if model.cfg.positional_embedding_type == "alibi" else ""
    return {
        name: value
        for name, value in model.state_dict().items()
        if not name.endswith(BUFFERS) and not re.match(refused, name) and name != unused
    }


def skip_experts(pair: Pair) -> None:
    if pair.theirs.cfg.num_experts:
        pytest.skip("experts' weights are refused, as a test below says")


@torch.no_grad()
def assert_same_run(pair: Pair, what: str = "") -> None:
    (logits, cache), (their_logits, their_cache) = pair.both(lambda model: model.run_with_cache(random_tokens(pair)))
    assert_close(logits, their_logits, f"logits after {what}")
    assert_same_cache(cache, their_cache)


# --- what is read ---------------------------------------------------------------------------------------------------


def test_every_parameter_is_theirs_by_name(pair: Pair) -> None:
    found, expected = learned(pair.ours), learned(pair.theirs)
    assert found.keys() == expected.keys()
    off = {name: error(found[name], value.detach()) for name, value in expected.items()}
    assert max(off.values()) <= 2e-5, {name: value for name, value in off.items() if value > 2e-5}


def test_every_parameter_is_theirs_as_an_attribute(pair: Pair) -> None:
    for name, value in learned(pair.theirs).items():
        assert_close(attrgetter(name)(pair.ours), value, name)


@pytest.mark.parametrize("name", STACKED)
def test_stacked_weights_are_theirs(pair: Pair, name: str) -> None:
    if pair.theirs.cfg.num_experts and name in ("W_in", "W_gate", "W_out", "b_in", "b_out"):
        with pytest.raises(Refused, match="mixture of experts"):
            getattr(pair.ours, name)
        return
    assert_close(getattr(pair.ours, name), getattr(pair.theirs, name))


def test_position_weights_are_theirs_where_positions_are_learned(pair: Pair) -> None:
    if pair.theirs.cfg.positional_embedding_type == "standard":
        assert_close(pair.ours.W_pos, pair.theirs.W_pos)
        assert_close(pair.ours.W_E_pos, pair.theirs.W_E_pos)
    else:
        with pytest.raises(AttributeError):
            pair.ours.W_pos  # noqa: B018


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_weights_of_a_layer_show_one_entry_a_query_head(pair: Pair, name: str) -> None:
    for ours, theirs in zip(pair.ours.blocks, pair.theirs.blocks):
        assert_close(getattr(ours.attn, name), getattr(theirs.attn, name))


@pytest.mark.parametrize("circuit", ["QK", "OV"])
def test_circuits_are_theirs(pair: Pair, circuit: str) -> None:
    for found, expected in (
        (getattr(pair.ours, circuit), getattr(pair.theirs, circuit)),
        (getattr(pair.ours.blocks[1].attn, circuit), getattr(pair.theirs.blocks[1].attn, circuit)),
        (getattr(pair.ours, circuit)[2, 1], getattr(pair.theirs, circuit)[2, 1]),
    ):
        assert found.shape == expected.shape
        assert_close([found.A, found.B, found.AB], [expected.A, expected.B, expected.AB])
        assert_close(found.norm(), expected.norm())


@pytest.mark.parametrize("mode", ["Q", "K", "V"])
def test_composition_scores_are_theirs(pair: Pair, mode: str) -> None:
    assert_close(pair.ours.all_composition_scores(mode), pair.theirs.all_composition_scores(mode))


def test_head_labels_and_parameter_counts_are_theirs(pair: Pair) -> None:
    assert pair.ours.all_head_labels() == pair.theirs.all_head_labels()
    if pair.theirs.cfg.positional_embedding_type != "alibi" and not pair.theirs.cfg.num_experts:
        assert pair.ours.n_params_total == pair.theirs.n_params_total
    assert pair.ours.cfg.n_params == pair.theirs.cfg.n_params


def test_accumulated_biases_are_theirs(pair: Pair) -> None:
    skip_experts(pair)
    n = pair.theirs.cfg.n_layers
    for layer in range(n + 1):
        for mlp_input in (False, True)[: 2 if layer < n else 1]:
            for mlps in (True, False):
                assert_close(*pair.both(lambda model: model.accumulated_bias(layer, mlp_input, mlps)))


def test_directions_of_tokens_are_theirs(pair: Pair) -> None:
    for tokens in (7, torch.tensor(9), torch.tensor([3, 4, 5]), torch.tensor([[3, 4], [5, 6]])):
        assert_close(*pair.both(lambda model: model.tokens_to_residual_directions(tokens)))


def test_small_modules_called_on_their_own_compute_what_theirs_compute(pair: Pair) -> None:
    tokens = random_tokens(pair)
    x = torch.randn(2, 9, pair.theirs.cfg.d_model, generator=torch.Generator().manual_seed(5)) + 0.3
    modules = ["ln_final", "unembed", "blocks.1.ln1", "blocks.1.ln2", "blocks.1.mlp"][: 4 if pair.theirs.cfg.num_experts else 5]
    for name in modules:
        assert_close(*pair.both(lambda model: attrgetter(name)(model)(x)), what=name)
    for name in ("embed", "pos_embed"):
        if hasattr(pair.ours, name):
            assert_close(*pair.both(lambda model: getattr(model, name)(tokens)), what=name)


# --- what is edited -------------------------------------------------------------------------------------------------


def editable(pair: Pair) -> list[str]:
    """Every parameter of TransformerLens' outside the blocks and in block 1, but for one that no checkpoint has."""
    names = [name for name in learned(pair.theirs) if not name.startswith("blocks.") or name.startswith("blocks.1.")]
    refused = {"blocks.1.mlp.b_in"} if pair.theirs.cfg.gated_mlp else set()  # added after the gate
    if pair.ours.engine.facts.shared_norm or pair.theirs.cfg.original_architecture == "OlmoForCausalLM":
        refused |= {name for name in names if re.search(r"\bln", name)}  # one norm for two, and one without weights
    return [name for name in names if name not in refused]


def changed(weight: Tensor, seed: int) -> Tensor:
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return weight.detach() * 0.9 + 0.05 * noise


def assign(model: Any, name: str, seed: int) -> None:
    owner, _, attribute = name.rpartition(".")
    value = changed(attrgetter(name)(model), seed)
    setattr(attrgetter(owner)(model), attribute, nn.Parameter(value))


def edit_in_place(model: Any, name: str, seed: int) -> None:
    weight = attrgetter(name)(model)
    with torch.no_grad():
        weight.copy_(changed(weight, seed))


def edit_a_slice(model: Any, name: str, seed: int) -> None:
    weight = attrgetter(name)(model)
    with torch.no_grad():
        (weight[-1] if weight.dim() else weight).mul_(-1.5)


def edit_data(model: Any, name: str, seed: int) -> None:
    weight = attrgetter(name)(model).data
    (weight[..., :3] if weight.dim() else weight).add_(0.25)


def assign_data(model: Any, name: str, seed: int) -> None:
    weight = attrgetter(name)(model)
    weight.data = changed(weight, seed)


EDITS: list[Callable[[Any, str, int], None]] = [assign, edit_in_place, edit_a_slice, edit_data, assign_data]


@pytest.fixture
def own(pair: Pair) -> Pair:
    """Models of the test's own, to be edited."""
    return new_pair(pair.name, pair.processed)


@pytest.fixture
def own_processed(processed_pair: Pair) -> Pair:
    return new_pair(processed_pair.name)


def test_edits_of_every_weight_one_after_another_take_effect(own: Pair) -> None:
    for seed, name in enumerate(editable(own)):
        edit = EDITS[seed % len(EDITS)]
        own.both(lambda model: edit(model, name, seed))
        assert_same_run(own, f"{edit.__name__} of {name}")
    found, expected = learned(own.ours), learned(own.theirs)
    assert max(error(found[name], value.detach()) for name, value in expected.items()) <= 2e-5


@pytest.mark.parametrize("edit", [assign, edit_data])
def test_edits_made_together_take_effect_together(own: Pair, edit: Callable) -> None:
    for seed, name in enumerate(editable(own)):
        own.both(lambda model: edit(model, name, seed))
    assert_same_run(own, edit.__name__)


@pytest.mark.parametrize("name", ["W_E", "W_U"])
def test_the_first_edit_may_be_made_at_the_root(own_processed: Pair, name: str) -> None:
    """Also where the checkpoint ties its unembedding to its embedding: the other one stays as it was."""
    own_processed.both(lambda model: edit_a_slice(model, name, 0))
    assert_same_run(own_processed, name)


def test_an_ablated_head_and_neuron_take_effect(own_processed: Pair) -> None:
    def ablate(model: Any) -> None:
        model.blocks[0].attn.W_O.data[1] = 0
        if not model.cfg.num_experts:
            model.blocks[2].mlp.W_out.data[5:20] = 0

    own_processed.both(ablate)
    assert_same_run(own_processed)


def test_an_edit_that_is_undone_is_undone(own_processed: Pair) -> None:
    def there_and_back(model: Any) -> list[Tensor]:
        tokens, seen = random_tokens(own_processed), []
        before = model.blocks[1].attn.W_O.detach().clone()
        for value in (before * 0, before):
            model.blocks[1].attn.W_O.data = value.clone()
            seen.append(model(tokens))
        return seen

    found, expected = own_processed.both(there_and_back)
    assert_close(found, expected)
    assert error(found[1], found[0]) > 0.01


def test_a_state_dict_of_theirs_is_taken(own: Pair) -> None:
    known, norms_may_change = learned(own.theirs), any(".ln1" in name for name in editable(own)) or own.processed
    with torch.no_grad():
        for seed, (name, weight) in enumerate(own.theirs.named_parameters()):
            gated_bias = own.theirs.cfg.gated_mlp and name.endswith("b_in")
            if name in known and not gated_bias and (norms_may_change or not re.search(r"\bln", name)):
                weight.copy_(changed(weight, seed))
    state = {name: value for name, value in own.theirs.state_dict().items() if name in known or name.endswith(BUFFERS)}
    result = own.ours.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert_same_run(own)


def test_a_state_dict_of_ours_is_taken_by_theirs(own: Pair) -> None:
    own.ours.blocks[1].attn.W_O.data *= 0.5
    own.ours(random_tokens(own))
    result = own.theirs.load_state_dict(own.ours.state_dict(), strict=False)
    assert not result.unexpected_keys and not set(result.missing_keys) & learned(own.theirs).keys()
    assert_same_run(own)


def test_an_edit_acts_in_generation_and_under_hooks_and_gradients_afterwards(own: Pair) -> None:
    own.both(lambda model: edit_data(model, "blocks.1.attn.W_O", 0))
    settings = dict(max_new_tokens=5, do_sample=False, verbose=False, stop_at_eos=False)
    found, expected = own.both(lambda model: model.generate(random_tokens(own), **settings))
    assert found.tolist() == expected.tolist()
    own.both(lambda model: edit_data(model, "blocks.1.attn.b_O", 0))
    hooks = [("blocks.1.attn.hook_z", lambda z, hook: z * 1.5), ("blocks.2.hook_resid_pre", lambda x, hook: x + 0.2)]
    assert_close(*own.both(lambda model: model.run_with_hooks(random_tokens(own), fwd_hooks=hooks)))
    run = lambda model: model.run_with_cache(random_tokens(own), return_type="loss", incl_bwd=True)[1]  # noqa: E731
    found, expected = own.both(run)
    assert_close(found["blocks.0.hook_resid_pre_grad"], expected["blocks.0.hook_resid_pre_grad"])


def test_the_bias_of_a_gated_mlp_is_refused_and_not_lost(own: Pair) -> None:
    """TransformerLens adds it after the gate, where no checkpoint has a bias."""
    if not own.theirs.cfg.gated_mlp or own.theirs.cfg.num_experts:
        pytest.skip("an MLP without a gate has the bias, and one with experts shows no weights")
    tokens = random_tokens(own)
    before = own.ours(tokens)
    own.ours.blocks[1].mlp.b_in.data += 1
    with pytest.raises(Refused, match="b_in of a gated MLP"):
        own.ours(tokens)
    assert torch.equal(own.ours(tokens), before)
