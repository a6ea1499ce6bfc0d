"""What stands in a container's place is called as TransformerLens calls it; the container's own insides go quiet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.tlens import HookedTransformer, HookedTransformerKeyValueCache
from compat.tlens.hook_points import HookPoint
from engine.errors import BadReplacement, Refused


class Recorder(nn.Module):
    """Notes how it is called, and gives what `answer` makes of the first tensor."""

    def __init__(self, answer: Any = lambda x: x) -> None:
        super().__init__()
        self.calls: list[tuple[tuple, dict[str, Any]]] = []
        self.answer = answer

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append((args, kwargs))
        return self.answer(args[0] if args else kwargs["query_input"])


def test_attention_is_called_with_keywords(gpt2: HookedTransformer, ids: Tensor) -> None:
    gpt2.blocks[1].attn = recorder = Recorder()
    gpt2(ids)
    ((args, kwargs),) = recorder.calls
    assert args == () and set(kwargs) == {
        "query_input",
        "key_input",
        "value_input",
        "past_kv_cache_entry",
        "attention_mask",
    }
    assert kwargs["past_kv_cache_entry"] is None and kwargs["attention_mask"] is None


def test_block_is_called_with_the_residual_and_the_mask(gpt2: HookedTransformer, ids: Tensor) -> None:
    gpt2.blocks[1] = recorder = Recorder()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    gpt2(ids, attention_mask=mask)
    (((residual,), kwargs),) = recorder.calls
    assert torch.equal(kwargs["attention_mask"], mask) and residual.shape == (*ids.shape, 128)
    assert kwargs["past_kv_cache_entry"] is None and kwargs["shortformer_pos_embed"] is None


@pytest.mark.parametrize("path", ["embed", "pos_embed"])
def test_embeddings_are_called_with_the_token_ids(gpt2: HookedTransformer, ids: Tensor, path: str) -> None:
    recorder = Recorder(lambda tokens: torch.zeros(*tokens.shape, 128))
    setattr(gpt2, path, recorder)
    gpt2(ids)
    assert torch.equal(recorder.calls[0][0][0], ids)


def test_mlp_reads_the_normalized_stream(gpt2: HookedTransformer, ids: Tensor) -> None:
    _, cache = gpt2.run_with_cache(ids)
    gpt2.blocks[1].mlp = recorder = Recorder()
    gpt2(ids)
    assert torch.allclose(recorder.calls[0][0][0], cache["blocks.1.ln2.hook_normalized"], atol=1e-5)


def test_container_is_called_once_a_forward_and_not_where_the_forward_does_not_go(
    gpt2: HookedTransformer, ids: Tensor
) -> None:
    gpt2.blocks[1].mlp, gpt2.unembed = (
        (mlp := Recorder()),
        (unembed := Recorder(lambda x: torch.zeros(*x.shape[:2], 403))),
    )
    gpt2(ids)
    gpt2(ids, stop_at_layer=1)
    gpt2(ids, return_type=None)
    gpt2(torch.randn(2, 4, 128), start_at_layer=2)
    assert (len(mlp.calls), len(unembed.calls)) == (2, 2)


def test_insides_of_a_replaced_container_do_not_fire(gpt2: HookedTransformer, ids: Tensor) -> None:
    gpt2.blocks[1].attn = Recorder()
    gpt2.blocks[2].forward = lambda residual, **kwargs: residual
    _, cache = gpt2.run_with_cache(ids)
    fired = {name for name in cache if name.startswith(("blocks.1.attn.", "blocks.2."))}
    assert fired == set() and "blocks.1.hook_attn_out" in cache


def test_hook_inside_a_patched_container_fires_once(gpt2: HookedTransformer, ids: Tensor) -> None:
    before, forward, fired = gpt2(ids), gpt2.blocks[1].forward, []
    gpt2.blocks[1].forward = lambda *args, **kwargs: forward(*args, **kwargs)
    logits = gpt2.run_with_hooks(ids, fwd_hooks=[("blocks.1.attn.hook_z", lambda x, hook: fired.append(x.shape))])
    assert len(fired) == 1
    assert torch.allclose(logits, before, atol=1e-5)


def test_result_of_another_shape_names_the_container(gpt2: HookedTransformer, ids: Tensor) -> None:
    gpt2.blocks[1].mlp = Recorder(lambda x: x[:, :3])
    with pytest.raises(BadReplacement, match=r"'blocks\.1\.mlp'.*\[2, 3, 128\].*\[2, 11, 128\]"):
        gpt2(ids)


@pytest.mark.parametrize("position_wise", ["blocks.1", "blocks.1.mlp"])
def test_generation_with_a_position_wise_replacement_uses_the_cache(
    gpt2: HookedTransformer, ids: Tensor, position_wise: str
) -> None:
    gpt2.get_submodule(position_wise.rpartition(".")[0])
    if position_wise == "blocks.1":
        gpt2.blocks[1] = Recorder(lambda x: x * 0.5)
    else:
        gpt2.blocks[1].mlp = Recorder(lambda x: x.sin())
    options = dict(max_new_tokens=4, do_sample=False, verbose=False)
    assert torch.equal(gpt2.generate(ids, **options), gpt2.generate(ids, use_past_kv_cache=False, **options))


def test_replacement_that_attends_cannot_use_the_cache_unnoticed(gpt2: HookedTransformer, ids: Tensor) -> None:
    forward = gpt2.blocks[1].attn.forward
    gpt2.blocks[1].attn.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    options = dict(max_new_tokens=3, do_sample=False, verbose=False)
    with pytest.raises(Refused, match="use_past_kv_cache=False"):
        gpt2.generate(ids, **options)
    with pytest.raises(Refused, match="without past_kv_cache"):
        gpt2(ids, past_kv_cache=HookedTransformerKeyValueCache.init_cache(gpt2.cfg, "cpu", len(ids)))
    patched = gpt2.generate(ids, use_past_kv_cache=False, **options)
    del gpt2.blocks[1].attn.forward
    assert torch.equal(patched, gpt2.generate(ids, **options))


def test_gradients_flow_through_a_replacement_and_not_around_it(gpt2: HookedTransformer, ids: Tensor) -> None:
    probe = nn.Linear(128, 128)
    gpt2.blocks[1].mlp = nn.Sequential(probe, nn.Tanh())
    gpt2(ids, return_type="loss").backward()
    assert probe.weight.grad.abs().max() > 0
    original = gpt2.engine.model.transformer.h[1].mlp.c_fc.weight
    assert original.grad is None or not original.grad.any()


def test_replacement_is_trained_with_the_rest(gpt2: HookedTransformer, ids: Tensor) -> None:
    gpt2.blocks[1].mlp = nn.Linear(128, 128)
    names = dict(gpt2.named_parameters())
    assert names["blocks.1.mlp.weight"] is gpt2.blocks[1].mlp.weight
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=0.1)
    before = gpt2.blocks[1].mlp.weight.clone()
    gpt2(ids, return_type="loss").backward()
    optimizer.step()
    assert not torch.equal(gpt2.blocks[1].mlp.weight, before)
    assert torch.equal(gpt2.state_dict()["blocks.1.mlp.weight"], gpt2.blocks[1].mlp.weight)


def test_sparse_autoencoder_in_a_hook_points_place_is_called_in_place_of_hooks(
    gpt2: HookedTransformer, ids: Tensor
) -> None:
    gpt2.blocks[1].hook_resid_post = recorder = Recorder(lambda x: x * 0.5)
    gpt2.setup()
    gpt2(ids)
    assert len(recorder.calls) == 1 and recorder.calls[0][0][0].shape == (2, 11, 128)
    assert "blocks.1.hook_resid_post" not in gpt2.hook_dict
    with pytest.raises(AssertionError, match="Recorder"):
        gpt2.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_resid_post", lambda x, hook: x)])


def test_module_that_takes_a_hook_points_place_may_take_hooks_itself(gpt2: HookedTransformer, ids: Tensor) -> None:
    class Half(HookPoint):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.5

    gpt2.blocks[1].hook_resid_post = Half()
    gpt2.setup()
    halved = gpt2(ids)
    seen = {}
    gpt2.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_resid_post", lambda x, hook: seen.update(x=x))])
    resid = gpt2(ids, stop_at_layer=2)
    assert torch.allclose(seen["x"], resid, atol=1e-5)
    assert torch.equal(gpt2(ids), halved)
