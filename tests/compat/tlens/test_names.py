"""Model names: aliases, local folders, other hub ids, and names that nothing answers to."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat.tlens.errors import BadArgument, UnknownModel
from compat.tlens.loading_from_pretrained import (
    checkpoint_fields,
    checkpoint_revision,
    get_checkpoint_labels,
    get_official_model_name,
)
from engine.errors import CompatError


@pytest.mark.parametrize("alias", ["gpt2-small", "GPT2-Small", "gpt2"])
def test_an_alias_in_any_case_gives_the_hub_id(alias: str) -> None:
    assert get_official_model_name(alias) == "gpt2"


def test_an_existing_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert get_official_model_name(str(tmp_path)) == str(tmp_path)
    assert get_official_model_name(tmp_path) == str(tmp_path)


def test_a_hub_id_that_is_not_listed_is_taken_as_it_is() -> None:
    assert get_official_model_name("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize("name", ["gpt-2-smal", "./no/such/folder", "/no/such/folder", "a/b/c", ""])
def test_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        get_official_model_name(name)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, CompatError)


def test_the_refusal_lists_the_nearest_names() -> None:
    with pytest.raises(UnknownModel, match="'gpt2-small'.*hub id 'org/name'"):
        get_official_model_name("gpt2-smal")


def test_a_checkpoint_by_index_and_by_value_are_the_same() -> None:
    by_index = checkpoint_fields("pythia-70m", 12, None)
    assert by_index == checkpoint_fields("pythia-70m", None, by_index["checkpoint_value"])
    assert by_index["checkpoint_value"] == 2000
    assert checkpoint_revision("pythia-70m", 2000) == "step2000"
    assert checkpoint_revision("stanford-gpt2-small-a", 100) == "checkpoint-100"


def test_the_first_pythias_have_no_early_checkpoints() -> None:
    assert get_checkpoint_labels("pythia-70m")[0][:3] == [0, 1, 2]
    assert get_checkpoint_labels("pythia-70m-v0")[0][:3] == [1000, 2000, 3000]


def test_a_checkpoint_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadArgument, match="1234"):
        checkpoint_fields("pythia-70m", None, 1234)
    with pytest.raises(ValueError, match="gpt2 is not checkpointed"):
        get_checkpoint_labels("gpt2")
