"""The public surface is TransformerLens 3.9.0's: every name and signature, or a short list of names with reasons."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
from torch import nn

from compat.tlens import HookedTransformer
from compat.tlens.HookedTransformer import Output

real = pytest.importorskip("transformer_lens")

FROM_CONFIG = "models that are built from a config are not served yet"
OTHER_KINDS = "encoders, encoder-decoders and audio models are not decoders"
NEXT = "the rest of the package comes next"
STATE_DICTS = "works on a state dict of unprocessed weights, and no weight is processed here: the numbers are views"

LEFT_OUT: dict[str, dict[str, str]] = {
    "": {
        "BertNextSentencePrediction": OTHER_KINDS,
        "HookedAudioEncoder": OTHER_KINDS,
        "HookedEncoder": OTHER_KINDS,
        "HookedEncoderDecoder": OTHER_KINDS,
        "SVDInterpreter": NEXT,
        "TransformerBridge": "the Bridge is another dialect",
        "TransformerBridgeConfig": "the Bridge is another dialect",
    },
    "HookedTransformer": {
        "init_weights": FROM_CONFIG,
        "load_and_process_state_dict": STATE_DICTS,
        "fill_missing_keys": STATE_DICTS,
        "fold_layer_norm": STATE_DICTS,
        "center_writing_weights": STATE_DICTS,
        "center_unembed": STATE_DICTS,
        "fold_value_biases": STATE_DICTS,
        "refactor_factored_attn_matrices": STATE_DICTS,
        "process_weights_": STATE_DICTS,
        "load_sample_training_dataset": NEXT,
        "sample_datapoint": NEXT,
        "get_pos_offset": "a step inside input_to_embed, which is served",
        "get_residual": "a step inside input_to_embed, which is served",
    },
}
CLASSES = (
    "HookedTransformer",
    "HookedTransformerConfig",
    "HookedRootModule",
    "ActivationCache",
    "FactoredMatrix",
    "HookPoint",
)
# what a checkpoint's own module offers here beyond TransformerLens
OURS: dict[str, set[str]] = {"HookedTransformer": {"address_of"}, "HookPoint": {"is_live", "reads_only"}}


def of(package: str, name: str) -> Any:
    submodule = {"HookPoint": "hook_points"}.get(name)
    return getattr(importlib.import_module(f"{package}.{submodule}" if submodule else package), name)


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, Any, str]]:
    """(name, default, kind) of each parameter; a sentinel is a default by its text."""
    plain = (type(None), bool, int, float, str)
    return [
        (each.name, each.default if isinstance(each.default, plain) else str(each.default), each.kind)
        for each in inspect.signature(function).parameters.values()
    ]


def test_every_class_of_the_package_is_here_or_left_out_with_a_reason() -> None:
    ours = importlib.import_module("compat.tlens")
    classes = {name for name in public(real) if inspect.isclass(getattr(real, name))}
    assert classes - public(ours) == LEFT_OUT[""].keys() & classes
    assert not LEFT_OUT[""].keys() & public(ours)


@pytest.mark.parametrize("name", CLASSES)
def test_every_member_is_here_or_left_out_with_a_reason(name: str) -> None:
    theirs, ours = public(of("transformer_lens", name)), public(of("compat.tlens", name))
    assert theirs - ours == LEFT_OUT.get(name, {}).keys()
    assert ours - theirs <= OURS.get(name, set()) | public(nn.Module)


@pytest.mark.parametrize("name", CLASSES)
def test_methods_take_the_same_parameters_in_the_same_order_with_the_same_defaults(name: str) -> None:
    theirs, ours = of("transformer_lens", name), of("compat.tlens", name)
    shared = (public(theirs) & public(ours)) - public(nn.Module) | {
        "__init__",
        "forward",
        "to",
        "cuda",
        "cpu",
    } & public(theirs)
    differing = {
        method: (parameters(getattr(ours, method)), parameters(getattr(theirs, method)))
        for method in shared | {"__init__"}
        if callable(getattr(theirs, method, None))
        and parameters(getattr(ours, method)) != parameters(getattr(theirs, method))
    }
    assert differing == {}


@pytest.mark.parametrize("name", CLASSES)
def test_properties_are_properties(name: str) -> None:
    theirs, ours = of("transformer_lens", name), of("compat.tlens", name)
    for member in (public(theirs) & public(ours)) - public(nn.Module):
        assert isinstance(getattr(ours, member), property) == isinstance(getattr(theirs, member), property), member


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("TransformerBlock", "forward"),
        ("MLP", "forward"),
        ("Unembed", "forward"),
        ("Embed", "forward"),
        ("PosEmbed", "forward"),
        ("LayerNormPre", "forward"),
    ],
)
def test_components_are_called_alike(name: str, method: str) -> None:
    theirs, ours = (
        getattr(importlib.import_module(f"{package}.components"), name)
        for package in ("transformer_lens", "compat.tlens")
    )
    names = [parameter for parameter, _, _ in parameters(getattr(theirs, method))]
    assert [parameter for parameter, _, _ in parameters(getattr(ours, method))] == names


def test_attention_is_called_alike() -> None:
    from transformer_lens.components import AbstractAttention as Theirs

    from compat.tlens.components import AbstractAttention as Ours

    assert parameters(Ours.forward) == parameters(Theirs.forward)


def test_every_reason_is_a_sentence() -> None:
    assert all(len(reason.split()) > 3 for reasons in LEFT_OUT.values() for reason in reasons.values())


def test_output_unpacks_as_the_originals() -> None:
    from transformer_lens.HookedTransformer import Output as Theirs

    assert Output._fields == Theirs._fields == ("logits", "loss")


def test_names_of_older_releases_are_here() -> None:
    import compat.tlens as ours

    assert ours.EasyTransformer is ours.HookedTransformer is HookedTransformer
    assert ours.EasyTransformerConfig is ours.HookedTransformerConfig
    assert ours.HookedTransformerKeyValueCache is ours.TransformerLensKeyValueCache
    assert ours.utils.get_act_name("q", 3) == "blocks.3.attn.hook_q"
    from compat.tlens.hook_points import HookedRootModule

    assert HookedRootModule is ours.HookedRootModule
