"""Programs as research notebooks hold them, unmodified, on the real library and on ours with equal results.

Ours run in a process of their own, in which `compat.install()` answers the import; each program leaves a `result`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import true_sizes

torch.set_num_threads(1)

TOLERANCE = 1e-4  # of the largest magnitude of the reference
SCRIPTS: dict[str, str] = {}

SCRIPTS["induction heads"] = """
import torch
from transformer_lens import HookedTransformer, utils
from transformer_lens.hook_points import HookPoint

torch.set_grad_enabled(False)
model = HookedTransformer.from_pretrained("gpt2-small")
seq_len, batch = 12, 3
rng = torch.Generator().manual_seed(0)
half = torch.randint(5, 400, (batch, seq_len), generator=rng)
prefix = torch.full((batch, 1), model.tokenizer.bos_token_id)
rep_tokens = torch.cat([prefix, half, half], dim=-1)

score_store = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, device=model.cfg.device)
def induction_score_hook(pattern, hook: HookPoint):
    stripe = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - seq_len)
    score_store[hook.layer()] = stripe.mean(dim=(0, -1))

pattern_hook_names_filter = lambda name: name.endswith("pattern")
fwd_hooks = [(pattern_hook_names_filter, induction_score_hook)]
loss = model.run_with_hooks(rep_tokens, return_type="loss", fwd_hooks=fwd_hooks)
names = [utils.get_act_name("pattern", l) for l in range(model.cfg.n_layers)]
_, cache = model.run_with_cache(rep_tokens, names_filter=names)
prev = [cache["pattern", l].diagonal(dim1=-2, dim2=-1, offset=-1).mean((0, -1)) for l in range(3)]
prev_token = torch.stack(prev)
result = dict(scores=score_store, loss=loss, prev_token=prev_token, names=list(cache.keys()))
"""

SCRIPTS["ioi patching"] = """
import torch
import transformer_lens.utils as utils
from functools import partial
from transformer_lens import HookedTransformer, patching

model = HookedTransformer.from_pretrained("gpt2", center_writing_weights=True, fold_ln=True)
prompts = ["When the cat saw the dog, the cat ran", "When the dog saw the cat, the cat ran"]
clean_tokens, corrupted_tokens = model.to_tokens(prompts[0]), model.to_tokens(prompts[1])
n = min(clean_tokens.shape[1], corrupted_tokens.shape[1])
clean_tokens, corrupted_tokens = clean_tokens[:, :n], corrupted_tokens[:, :n]
a, b = model.to_tokens(" c", prepend_bos=False)[0, 0], model.to_tokens(" d", prepend_bos=False)[0, 0]
def logit_diff(logits):
    return (logits[:, -1, a] - logits[:, -1, b]).mean()

clean_logits, clean_cache = model.run_with_cache(clean_tokens)
corrupted_logits, _ = model.run_with_cache(corrupted_tokens)
clean, corrupted = logit_diff(clean_logits), logit_diff(corrupted_logits)
metric = lambda logits: (logit_diff(logits) - corrupted) / (clean - corrupted)

def patch_residual_component(corrupted_residual_component, hook, pos, clean_cache):
    corrupted_residual_component[:, pos, :] = clean_cache[hook.name][:, pos, :]
    return corrupted_residual_component
by_hand = torch.zeros(model.cfg.n_layers, n)
for layer in range(model.cfg.n_layers):
    for position in range(n):
        hook_fn = partial(patch_residual_component, pos=position, clean_cache=clean_cache)
        fwd_hooks = [(utils.get_act_name("resid_pre", layer), hook_fn)]
        logits = model.run_with_hooks(corrupted_tokens, fwd_hooks=fwd_hooks, return_type="logits")
        by_hand[layer, position] = metric(logits).item()
result = dict(
    by_hand=by_hand,
    resid_pre=patching.get_act_patch_resid_pre(model, corrupted_tokens, clean_cache, metric),
    heads=patching.get_act_patch_attn_head_out_all_pos(model, corrupted_tokens, clean_cache, metric),
    every=patching.get_act_patch_block_every(model, corrupted_tokens, clean_cache, metric),
    patterns=patching.get_act_patch_attn_head_pattern_all_pos(model, corrupted_tokens, clean_cache, metric),
)
"""

SCRIPTS["logit lens"] = """
import torch
from transformer_lens import HookedTransformer

for_all = {}
for name in ("gpt2", "pythia-70m"):
    model = HookedTransformer.from_pretrained(name)
    model.eval()
    tokens = model.to_tokens("the quick brown fox", prepend_bos=True)
    logits, cache = model.run_with_cache(tokens, remove_batch_dim=True)
    incl_mid = not model.cfg.parallel_attn_mlp
    accumulated, labels = cache.accumulated_resid(layer=-1, incl_mid=incl_mid, apply_ln=True, return_labels=True)
    lens = accumulated @ model.W_U + model.b_U
    layers = range(model.cfg.n_layers)
    by_hand = torch.stack([model.unembed(model.ln_final(cache["resid_post", l][None])) for l in layers])
    for_all |= {f"{name} lens": lens, f"{name} by hand": by_hand, f"{name} labels": labels}
    for_all |= {f"{name} end": torch.allclose(lens[-1], logits[0], atol=1e-3)}
result = for_all
"""

SCRIPTS["direct logit attribution"] = """
import torch
import einops
from transformer_lens import HookedTransformer, ActivationCache

torch.set_grad_enabled(False)
model = HookedTransformer.from_pretrained("gpt2-small")
model.set_use_attn_result(True)
tokens = torch.stack([torch.arange(20, 31), torch.arange(60, 71)])
answers = torch.tensor([[7, 9], [12, 4]])
logits, cache = model.run_with_cache(tokens)
directions = model.tokens_to_residual_directions(answers)
logit_diff_directions = directions[:, 0] - directions[:, 1]

def residual_stack_to_logit_diff(residual_stack, cache: ActivationCache):
    scaled = cache.apply_ln_to_stack(residual_stack, layer=-1, pos_slice=-1)
    return einops.einsum(scaled, logit_diff_directions, "... batch d_model, batch d_model -> ...") / len(tokens)

per_layer, labels = cache.decompose_resid(layer=-1, pos_slice=-1, return_labels=True)
per_head = cache.stack_head_results(layer=-1, pos_slice=-1)
whole, names = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True, pos_slice=-1)
result = dict(
    per_layer=residual_stack_to_logit_diff(per_layer, cache),
    per_head=residual_stack_to_logit_diff(per_head, cache),
    labels=labels, names=names,
    attrs=cache.logit_attrs(whole, tokens=answers[:, 0], incorrect_tokens=answers[:, 1], pos_slice=-1),
    total=residual_stack_to_logit_diff(whole, cache).sum(),
    diff=(logits[torch.arange(2), -1, answers[:, 0]] - logits[torch.arange(2), -1, answers[:, 1]]).mean(),
)
"""

SCRIPTS["steering vector"] = """
import torch
from transformer_lens import HookedTransformer

model = HookedTransformer.from_pretrained("EleutherAI/pythia-70m")
name = "blocks.1.hook_resid_pre"
def resid(prompt):
    return model.run_with_cache(prompt, names_filter=name)[1][name]
pair = model.to_tokens(["love love", "hate hate"])
act_diff = model.run_with_cache(pair)[1][name][:1] - model.run_with_cache(pair)[1][name][1:]

def ave_hook(resid_pre, hook):
    if resid_pre.shape[1] == 1:
        return
    n = min(resid_pre.shape[1], act_diff.shape[1])
    resid_pre[:, :n] += 4.0 * act_diff[:, :n]

def hooked_generate(prompts, fwd_hooks=[], seed=None, **kwargs):
    if seed is not None:
        torch.manual_seed(seed)
    with model.hooks(fwd_hooks=fwd_hooks):
        return model.generate(model.to_tokens(prompts), max_new_tokens=8, do_sample=True, verbose=False, **kwargs)

sampling = dict(temperature=1.0, top_p=0.3, freq_penalty=1.0)
result = dict(
    steered=hooked_generate(["I think the dog"] * 3, [(name, ave_hook)], seed=3, **sampling),
    plain=hooked_generate(["I think the dog"] * 3, seed=3, **sampling),
    greedy=model.generate("I think the", max_new_tokens=5, do_sample=False, verbose=False),
    logits=model.run_with_hooks("I think the dog", fwd_hooks=[(name, ave_hook)]),
)
"""

SCRIPTS["attribution patching"] = """
import torch
from transformer_lens import HookedTransformer, ActivationCache

model = HookedTransformer.from_pretrained("gpt2")
model.set_use_attn_result(True)
clean, corrupted = torch.arange(20, 31)[None], torch.arange(60, 71)[None]
metric = lambda logits: logits[0, -1, 5] - logits[0, -1, 8]
filter_not_qkv_input = lambda name: not name.endswith(("_input", "attn_in", "mlp_in"))

def get_cache_fwd_and_bwd(model, tokens, metric):
    model.reset_hooks()
    cache, grad_cache = {}, {}
    def forward_cache_hook(act, hook):
        cache[hook.name] = act.detach()
    model.add_hook(filter_not_qkv_input, forward_cache_hook, "fwd")
    def backward_cache_hook(act, hook):
        grad_cache[hook.name] = act.detach()
    model.add_hook(filter_not_qkv_input, backward_cache_hook, "bwd")
    value = metric(model(tokens))
    value.backward()
    model.reset_hooks()
    return value.item(), ActivationCache(cache, model), ActivationCache(grad_cache, model)

clean_value, clean_cache, clean_grad = get_cache_fwd_and_bwd(model, clean, metric)
corrupted_value, corrupted_cache, corrupted_grad = get_cache_fwd_and_bwd(model, corrupted, metric)
stack = lambda cache, name: torch.stack([cache[name, l] for l in range(model.cfg.n_layers)])
def attribute(name, dims):
    return (stack(corrupted_grad, name) * (stack(clean_cache, name) - stack(corrupted_cache, name))).sum(dims)
result = dict(
    values=torch.tensor([clean_value, corrupted_value]),
    head_out=attribute("z", (1, 2, 4)),
    results=attribute("result", (1, 2, 4)),
    pattern=attribute("pattern", (1, 3, 4)),
    resid=attribute("resid_pre", (1, 3)),
)
"""

SCRIPTS["head ablation sweep"] = """
import torch
from functools import partial
from tqdm import tqdm
from transformer_lens import HookedTransformer
import transformer_lens.utils as utils

torch.set_grad_enabled(False)
model = HookedTransformer.from_pretrained("meta-llama/Llama-3.2-1B")
tokens = torch.stack([torch.arange(20, 31), torch.arange(60, 71)])
baseline, cache = model.run_with_cache(tokens, return_type="loss")
means = torch.stack([cache["z", l].mean((0, 1)) for l in range(model.cfg.n_layers)])
zero, mean = (torch.zeros(model.cfg.n_layers, model.cfg.n_heads) for _ in range(2))
def ablate(z, hook, head, value=None):
    z[:, :, head] = 0.0 if value is None else value
    return z
for layer in tqdm(range(model.cfg.n_layers), disable=True):
    for head in range(model.cfg.n_heads):
        for store, value in ((zero, None), (mean, means[layer, head])):
            hook = (utils.get_act_name("z", layer), partial(ablate, head=head, value=value))
            loss = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=[hook])
            store[layer, head] = loss - baseline
result = dict(baseline=baseline, zero=zero, mean=mean)
"""

SCRIPTS["sae splice"] = """
import torch
from torch import nn
from transformer_lens import HookedTransformer
from transformer_lens.hook_points import HookPoint, HookedRootModule

class SAE(HookedRootModule):
    def __init__(self, d_in, d_sae):
        super().__init__()
        rng = torch.Generator().manual_seed(1)
        self.W_enc = nn.Parameter(torch.randn(d_in, d_sae, generator=rng) / d_in**0.5)
        self.b_enc = nn.Parameter(-0.5 * torch.ones(d_sae))
        self.hook_acts = HookPoint()
        self.setup()
    def forward(self, x):
        return self.hook_acts(torch.relu(x @ self.W_enc + self.b_enc)) @ self.W_enc.T

model = HookedTransformer.from_pretrained("gpt2-small")
tokens = torch.stack([torch.arange(20, 31), torch.arange(60, 71)])
sae = SAE(model.cfg.d_model, 256)
replace = lambda act, hook: sae(act)
_, cache = model.run_with_cache(tokens)
_, inner = sae.run_with_cache(cache["resid_pre", 2])
with torch.no_grad():
    point, zero = "blocks.2.hook_resid_pre", lambda act, hook: torch.zeros_like(act)
    spliced = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=[(point, replace)])
    zeroed = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=[(point, zero)])
optimizer = torch.optim.Adam(sae.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    loss = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=[("blocks.2.hook_resid_pre", replace)])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
result = dict(acts=inner["hook_acts"], spliced=spliced, zeroed=zeroed, losses=torch.tensor(losses), trained=sae.W_enc)
"""

SCRIPTS["neurons"] = """
import torch
from transformer_lens import HookedTransformer, utils

torch.set_grad_enabled(False)
model = HookedTransformer.from_pretrained("google/gemma-2-2b")
texts = ["the cat sat on the mat", "a dog ran in the park and", "one two three four", "to be or not to be"]
best = []
for text in texts:
    names = lambda name: name.endswith("mlp.hook_post")
    _, cache = model.run_with_cache(text, names_filter=names, remove_batch_dim=True)
    acts = torch.stack([cache[utils.get_act_name("post", l)] for l in range(model.cfg.n_layers)])
    best.append(acts.abs().amax(1))
best = torch.stack(best)
layer, neuron = divmod(best.amax(0).argmax().item(), model.cfg.d_mlp)
def kill(post, hook):
    post[..., neuron] = 0
hooks = [(f"blocks.{layer}.mlp.hook_post", kill)]
killed = torch.stack([model.run_with_hooks(text, return_type="loss", fwd_hooks=hooks) for text in texts])
direct = model.W_out[layer, neuron] @ model.W_U
top = model.to_str_tokens(direct.topk(5).indices)
result = dict(best=best, where=(layer, neuron), killed=killed, direct=direct, top=top)
"""

SCRIPTS["circuits by their weights"] = """
import torch
from transformer_lens import HookedTransformer, FactoredMatrix

torch.set_grad_enabled(False)
model = HookedTransformer.from_pretrained("gpt2-small")
OV, QK = model.OV, model.QK
full_OV = FactoredMatrix(model.W_E @ model.W_V[1, 2], model.W_O[1, 2] @ model.W_U)
copying = full_OV.AB.argmax(-1).eq(torch.arange(model.cfg.d_vocab)).float().mean()
U, S, Vh = OV[1].svd()
result = dict(
    singular=OV.svd()[1],
    eigenvalues=torch.view_as_real(full_OV.eigenvalues).abs().sum(),
    trace=(OV[0, 0].AB.trace()), norm=QK.norm(), copying=copying,
    rebuilt=(U * S[..., None, :]) @ Vh.transpose(-2, -1),
    K=model.all_composition_scores("K"), V=model.all_composition_scores("V"), labels=model.all_head_labels(),
    positional=model.W_pos @ model.W_Q[0, 1] @ model.W_K[0, 1].T @ model.W_pos.T,
    bias=model.accumulated_bias(2),
)
"""

SCRIPTS["path patching"] = """
import torch
from functools import partial
from transformer_lens import HookedTransformer, utils

torch.set_grad_enabled(False)
model = HookedTransformer.from_pretrained("gpt2-small")
clean, corrupted = torch.arange(20, 31)[None], torch.arange(60, 71)[None]
z_filter = lambda name: name.endswith("z")
_, clean_cache = model.run_with_cache(clean, names_filter=z_filter, return_type=None)
_, corrupted_cache = model.run_with_cache(corrupted, names_filter=z_filter, return_type=None)

def patch_or_freeze(z, hook, sender):
    z[...] = clean_cache[hook.name]
    if hook.layer() == sender[0]:
        z[:, :, sender[1]] = corrupted_cache[hook.name][:, :, sender[1]]
    return z
receiver = [utils.get_act_name("k", 2), utils.get_act_name("v", 2)]
scores = torch.zeros(2, model.cfg.n_heads)
for layer in range(2):
    for head in range(model.cfg.n_heads):
        model.reset_hooks()
        model.add_hook(z_filter, partial(patch_or_freeze, sender=(layer, head)), level=1)
        _, patched = model.run_with_cache(clean, names_filter=lambda name: name in receiver, return_type=None)
        model.reset_hooks()
        hooks = [(name, lambda act, hook: patched[hook.name]) for name in receiver]
        logits = model.run_with_hooks(clean, fwd_hooks=hooks)
        scores[layer, head] = logits[0, -1, 5] - logits[0, -1, 8]
result = dict(scores=scores)
"""

RUNNER = """
import sys, torch
torch.set_num_threads(1)
import compat
compat.install()
from tests.parity.test_tlens_scripts import SCRIPTS, run
torch.save({name: run(text) for name, text in SCRIPTS.items()}, sys.argv[1])
assert "compat.tlens" in sys.modules and sys.modules["transformer_lens"] is sys.modules["compat.tlens"]
"""


def run(text: str) -> dict[str, Any]:
    """The `result` that a program leaves, whatever it does to torch's switches."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng():
        try:
            exec(compile(text, "notebook", "exec"), names)
        finally:
            torch.set_grad_enabled(True)
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in names["result"].items()}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, tiny_hub: Path) -> dict[str, dict[str, Any]]:
    """What every program leaves with our library answering, computed in one process."""
    out = tmp_path_factory.mktemp("scripts") / "results.pt"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", RUNNER, str(out)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.mark.parametrize("script", SCRIPTS)
def test_program_leaves_the_same_result(ours: dict[str, dict[str, Any]], script: str) -> None:
    with true_sizes():
        expected = run(SCRIPTS[script])
    assert ours[script].keys() == expected.keys()
    for name, value in expected.items():
        got = ours[script][name]
        if not isinstance(value, Tensor):
            assert got == value, name
        elif not value.is_floating_point():
            assert torch.equal(got, value), name
        else:
            assert got.shape == value.shape, name
            assert (got - value).abs().max() <= TOLERANCE * value.abs().max().clamp(min=1e-3), name
