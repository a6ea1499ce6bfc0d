"""TransformerLens' names and our addresses: a table that can be read both ways, family by family."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from compat.tlens.ActivationCache import ActivationCache
from compat.tlens.utils import get_act_name
from engine.eager.load import load_eager
from engine.errors import Refused, UnknownName
from engine.points import POINTS, Address
from engine.seam import Facts
from mappers import tlens as mapper
from tests.hub import NAMES


@lru_cache(maxsize=None)
def facts_of(name: str) -> Facts:
    return load_eager(name).facts


def full(entry: mapper.Row | mapper.Unmapped, layer: int = 1) -> str:
    return f"blocks.{layer}.{entry.name}" if entry.layered else entry.name


@pytest.mark.parametrize("name", NAMES)
def test_a_hooked_transformers_name_comes_back_first_from_its_address(name: str) -> None:
    facts = facts_of(name)
    for hook in mapper.names(facts, use_hook_tokens=True):
        assert mapper.to_names(mapper.to_address(hook, facts), facts)[0] == hook


@pytest.mark.parametrize("name", NAMES)
def test_an_alias_has_the_address_of_its_twin_and_comes_back_with_it(name: str) -> None:
    facts = facts_of(name)
    twins = {row.point: full(row) for row in mapper.ROWS if row.has(facts)}
    aliases = [row for row in mapper.ALIASES if row.has(facts)]
    for row in aliases:
        address = mapper.to_address(full(row), facts)
        assert full(row) in mapper.to_names(address, facts)
        if row.point in twins:
            assert address == mapper.to_address(twins[row.point], facts)
            assert row.flag in (None, mapper.flag(twins[row.point]))
    assert len({row.name for row in aliases}) == len(aliases)


@pytest.mark.parametrize("name", NAMES)
def test_every_point_of_a_family_has_a_name_where_hooked_transformer_can_show_it(name: str) -> None:
    engine = load_eager(name)
    nameless = ["logits"] if engine.facts.positions == "rotary" else ["q_rot.0", "k_rot.0", "logits"]
    served = [Address(point.name, 0 if point.layered else None) for point in POINTS.values()]
    served = [address for address in served if engine.refuses(address, "read") is None]
    assert [str(address) for address in served if not mapper.to_names(address, engine.facts)] == nameless


@pytest.mark.parametrize("name", NAMES)
def test_no_name_is_both_mapped_and_unmapped_on_one_family(name: str) -> None:
    mapped = {full(row) for row in (*mapper.ROWS, *mapper.ALIASES) if row.has(facts_of(name))}
    unmapped = {full(row) for row in mapper.UNMAPPED if row.has(facts_of(name))}
    assert not mapped & unmapped


@pytest.mark.parametrize("name", NAMES)
def test_an_unmapped_name_is_refused_with_its_reason(name: str) -> None:
    for row in mapper.UNMAPPED:
        if row.has(facts_of(name)):
            with pytest.raises(Refused) as refusal:
                mapper.to_address(full(row), facts_of(name))
            assert repr(full(row)) in str(refusal.value) and row.reason in str(refusal.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_another_family_is_said_to_be_absent(name: str) -> None:
    facts = facts_of(name)
    here = {row.name for row in (*mapper.ROWS, *mapper.ALIASES, *mapper.UNMAPPED) if row.has(facts)}
    absent = [row for row in (*mapper.ROWS, *mapper.ALIASES, *mapper.UNMAPPED) if row.name not in here]
    assert absent
    for row in absent:
        reason = f"{facts.architecture} has no {row.has.name}, so the name is absent there"
        with pytest.raises(UnknownName, match=reason):
            mapper.to_address(full(row), facts)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("blocks.1.attn.hook_patern", "blocks.1.attn.hook_pattern"),
        ("blocks.0.hook_residual_post", "blocks.0.hook_resid_post"),
        ("ln_final.hook_scal", "ln_final.hook_scale"),
    ],
)
def test_an_unknown_name_brings_the_nearest_names(typed: str, meant: str) -> None:
    with pytest.raises(UnknownName) as unknown:
        mapper.to_address(typed, facts_of("gpt2"))
    assert meant in unknown.value.nearest and meant in str(unknown.value)


def test_a_name_with_a_layer_too_many_or_too_few_is_put_right() -> None:
    with pytest.raises(UnknownName, match="it has no layer; write hook_embed"):
        mapper.to_address("blocks.0.hook_embed", facts_of("gpt2"))
    with pytest.raises(UnknownName, match="as in blocks.0.attn.hook_z"):
        mapper.to_address("attn.hook_z", facts_of("gpt2"))


def test_a_layer_that_the_model_lacks_is_unknown_and_the_layers_are_told() -> None:
    with pytest.raises(UnknownName, match="layers 0 to 2"):
        mapper.to_address("blocks.3.hook_resid_post", facts_of("gpt2"))
    with pytest.raises(UnknownName):
        mapper.to_address("blocks.01.hook_resid_post", facts_of("gpt2"))
    assert mapper.to_names(Address("resid_post", 3), facts_of("gpt2")) == []


def test_names_mean_what_the_family_makes_of_them() -> None:
    gpt2, pythia, llama, gemma = (facts_of(NAMES[index]) for index in (0, 1, 2, 4))
    assert mapper.to_address("blocks.0.mlp.in.hook_out", gpt2) == Address("mlp_pre", 0)
    assert mapper.to_address("blocks.0.mlp.in.hook_out", llama) == Address("mlp_pre_linear", 0)
    assert mapper.to_address("blocks.0.ln1_post.hook_in", gemma) == Address("attn_out", 0)
    assert "blocks.0.hook_resid_mid" in mapper.names(llama)
    assert "blocks.0.hook_resid_mid" not in mapper.names(pythia)


# A block's norms of q and k have no short form; unembed's own hooks have none either.
WITHOUT_SHORT_FORM = ("attn.q_norm.", "attn.k_norm.", "unembed.")


@pytest.mark.parametrize("name", NAMES)
def test_short_forms_reach_every_name_that_has_one(name: str) -> None:
    facts = facts_of(name)
    cache = ActivationCache({hook: torch.tensor(0.0) for hook in mapper.names(facts)}, model=None)
    cache.cache_dict = {hook: hook for hook in cache.cache_dict}
    for row in mapper.ROWS:
        if not row.has(facts) or row.flag == "use_hook_tokens" or row.name.startswith(WITHOUT_SHORT_FORM):
            continue
        owner, _, hook = row.name.rpartition(".")
        short = hook.removeprefix("hook_")
        for layer in range(facts.n_layers) if row.layered else (None,):
            sublayer = () if owner in ("", "attn", "mlp") else (owner,)
            parts = (short,) if layer is None else (short, layer, *sublayer)
            wanted = full(row, layer)
            assert get_act_name(*parts) == wanted
            assert cache[parts if len(parts) > 1 else short] == wanted
            assert mapper.to_address(get_act_name(*parts), facts) == Address(row.point, layer)


def test_a_short_form_may_count_layers_from_the_end_and_use_old_words() -> None:
    facts = facts_of("gpt2")
    for parts, point in {
        ("z", 2): "z",
        ("key", 2): "k",
        ("attn", 2): "attn_probs",
        ("attn_logits", 2): "attn_scores",
        ("mlp_post", 2): "mlp_act",
        ("k", 2, "a"): "k",
        ("pre2",): "mlp_pre",
        ("scale2ln1",): "attn_norm_scale",
    }.items():
        assert mapper.to_address(get_act_name(*parts), facts) == Address(point, 2)
