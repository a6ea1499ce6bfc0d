"""Every name that TransformerLens knows means the same model here."""

from __future__ import annotations

import pytest
from transformer_lens import loading_from_pretrained as reference
from transformer_lens import supported_models as reference_table

from compat.tlens import loading_from_pretrained as ours
from compat.tlens import supported_models as our_table


def test_the_tables_are_the_same() -> None:
    assert our_table.OFFICIAL_MODEL_NAMES == reference_table.OFFICIAL_MODEL_NAMES
    assert our_table.MODEL_ALIASES == reference_table.MODEL_ALIASES
    assert our_table.DEFAULT_MODEL_ALIASES == reference_table.DEFAULT_MODEL_ALIASES
    assert ours.NON_HF_HOSTED_MODEL_NAMES == reference.NON_HF_HOSTED_MODEL_NAMES
    assert ours.NEED_REMOTE_CODE_MODELS == reference.NEED_REMOTE_CODE_MODELS


def test_every_alias_resolves_to_the_same_hub_id() -> None:
    assert ours.make_model_alias_map() == reference.make_model_alias_map()
    for name in [*reference_table.OFFICIAL_MODEL_NAMES, *sum(reference_table.MODEL_ALIASES.values(), [])]:
        assert ours.get_official_model_name(name) == reference.get_official_model_name(name)
        assert ours.get_official_model_name(name.upper()) == reference.get_official_model_name(name.upper())


@pytest.mark.parametrize("name", ["pythia-70m", "pythia-1b-deduped-v0", "stanford-gpt2-medium-c"])
def test_checkpoints_have_the_same_labels(name: str) -> None:
    assert ours.get_checkpoint_labels(name) == reference.get_checkpoint_labels(name)
