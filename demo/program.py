"""Where does a small language model keep track of who is who? A TransformerLens notebook, as a script.

usage: program.py MODEL RESULTS.npz
"""

import sys
import time

import numpy as np
import torch
from tqdm import tqdm
from transformer_lens import HookedTransformer
from transformer_lens.hook_points import HookPoint
from transformer_lens.utils import get_act_name

torch.set_grad_enabled(False)
model_name, results_path = sys.argv[1:]
results, seconds = {}, {}
started = time.perf_counter()


def done(step):
    """Note how long the step took since the last one, and say so."""
    seconds[step] = time.perf_counter() - started - sum(seconds.values())
    print(f"{step}: {seconds[step]:.1f} s", flush=True)


# 1. The model
model = HookedTransformer.from_pretrained(model_name)
n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
done("load the model")

# 2. A prompt whose answer is known, and a corrupted one with the answer swapped
clean_prompt = "When Mary and John went to the store, John gave a drink to"
corrupted_prompt = "When Mary and John went to the store, Mary gave a drink to"
clean_tokens = model.to_tokens(clean_prompt)
corrupted_tokens = model.to_tokens(corrupted_prompt)
mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")

clean_logits, clean_cache = model.run_with_cache(clean_tokens)
corrupted_logits = model(corrupted_tokens)


def mary_over_john(logits):
    """How much more likely the model finds Mary than John as the next word, in logits."""
    return logits[:, -1, mary] - logits[:, -1, john]


clean_score, corrupted_score = mary_over_john(clean_logits), mary_over_john(corrupted_logits)
print(f"Mary over John: {clean_score.item():.2f} on the clean prompt, {corrupted_score.item():.2f} on the corrupted")
results["tokens"] = np.array(model.to_str_tokens(clean_prompt))
results["next-token logits"] = clean_logits[0, -1].numpy()
results["loss"] = model(clean_tokens, return_type="loss").numpy()
results["residual stream"] = clean_cache[get_act_name("resid_post", n_layers - 1)][0].numpy()
done("run with cache")

# 3. Induction heads: on random tokens that repeat, which heads look at what came after the same token last time?
torch.manual_seed(0)
length = 30
half = torch.randint(1000, model.cfg.d_vocab, (2, length))
repeated = torch.cat([torch.full((2, 1), model.tokenizer.bos_token_id), half, half], dim=1)
induction = torch.zeros(n_layers, n_heads)


def score_induction(pattern, hook: HookPoint):
    stripe = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - length)
    induction[hook.layer()] = stripe.mean(dim=(0, -1))


model.run_with_hooks(
    repeated, return_type=None, fwd_hooks=[(lambda name: name.endswith("hook_pattern"), score_induction)]
)
layer, head = divmod(int(induction.argmax()), n_heads)
print(f"strongest induction head: L{layer}H{head}, score {induction[layer, head]:.2f}")
results["induction scores"] = induction.numpy()
results["strongest induction head"] = np.array([layer, head])

_, repeated_cache = model.run_with_cache(repeated[:1], names_filter=get_act_name("pattern", layer))
results["attention pattern"] = repeated_cache["pattern", layer][0, head].numpy()
done("find induction heads")

# 4. Direct logit attribution: which components and heads write the answer?
answers = (torch.tensor([mary]), torch.tensor([john]))
components, component_labels = clean_cache.decompose_resid(layer=-1, pos_slice=-1, return_labels=True)
results["component labels"] = np.array(component_labels)
results["components' logit attributions"] = clean_cache.logit_attrs(components, *answers, pos_slice=-1)[:, 0].numpy()
heads = clean_cache.stack_head_results(layer=-1, pos_slice=-1)
by_head = clean_cache.logit_attrs(heads, *answers, pos_slice=-1)[:, 0]
best = int(by_head.argmax())
print(f"head that writes Mary most: L{best // n_heads}H{best % n_heads}, {by_head[best]:.2f} logits")
results["heads' logit attributions"] = by_head.view(n_layers, n_heads).numpy()
done("attribute logits")


# 5. Activation patching: put the clean stream into the corrupted run, one layer and position at a time. Row i of the
# batch is patched at position i.
n_positions = clean_tokens.shape[1]
each = torch.arange(n_positions)


def patch_each_position(resid, hook: HookPoint):
    resid[each, each] = clean_cache[hook.name][0]
    return resid


patched = torch.zeros(n_layers, n_positions)
for layer in tqdm(range(n_layers), desc="activation patching", mininterval=1):
    logits = model.run_with_hooks(
        corrupted_tokens.repeat(n_positions, 1),
        fwd_hooks=[(get_act_name("resid_pre", layer), patch_each_position)],
    )
    patched[layer] = mary_over_john(logits)
results["patching"] = ((patched - corrupted_score) / (clean_score - corrupted_score)).numpy()
done("patch activations")

# 6. And what does the model say?
text = model.generate(clean_prompt, max_new_tokens=24, do_sample=False, verbose=False)
print(text)
results["generated text"] = np.array(text)
done("generate")

np.savez(results_path, **results, seconds=np.array(list(seconds.items())))
