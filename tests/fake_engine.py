"""An engine without a model: made-up tensors in forward order, for tests of what stands on the seam."""

from dataclasses import MISSING, fields, replace
from itertools import count
from zlib import crc32

import torch

from engine.points import POINTS, Address
from engine.seam import Facts
from engine.taps import Taps

SIZES = dict(n_layers=2, d_model=6, n_heads=2, n_kv_heads=2, d_head=4, d_mlp=10, d_vocab=12, n_ctx=9)
FACTS = Facts(
    **dict.fromkeys(field.name for field in fields(Facts))
    | {field.name: field.default for field in fields(Facts) if field.default is not MISSING}
    | SIZES
    | dict(model_id="fake", dtype=torch.float32)
)
AXES = dict(D="d_model", H="n_heads", K="n_kv_heads", dh="d_head", M="d_mlp", V="d_vocab")


class FakeEngine:
    """Each address has a value of its own; an edit adds the mean of its change to every value that comes later."""

    def __init__(self, tokenizer=None, weights=None, **facts):
        self.facts, self.weights, self.tokenizer = replace(FACTS, **facts), weights, tokenizer

    def run(self, batch, taps, *, start=None, stop=None, cache=None, grad=False, unembed=True):
        live, shift = taps if isinstance(taps, Taps) else Taps(taps), 0.0
        for address in self._in_order(0 if start is None else start[0], stop):
            made = batch.tokens if address.point == "tokens" else self._drawn(address, *batch.shape) + shift
            value = live.fire(address, made.clone())
            shift = shift + (value - made).float().mean()
        return value if unembed or stop is not None else None

    def generate(self, batch, taps, sample):
        for step in count():
            ids = sample(self.run(batch, taps(step))[:, -1])
            if ids is None:
                return
            yield ids

    def new_cache(self):
        return []

    def refuses(self, address, mode):
        return None if address.layer is None or address.layer < self.facts.n_layers else "there is no such layer"

    def close(self):
        pass

    def _in_order(self, first, stop):
        outside = [Address(point.name) for point in POINTS.values() if not point.layered]
        layers = range(first, self.facts.n_layers if stop is None else stop)
        inside = [Address(point.name, layer) for layer in layers for point in POINTS.values() if point.layered]
        n = 1 + outside.index(Address("pos_embed"))
        return (outside[:n] if first == 0 else []) + inside + (outside[n:] if stop is None else [])

    def _drawn(self, address, batch, pos):
        sizes = dict(b=batch, p=pos, q=pos, k=pos) | {axis: getattr(self.facts, name) for axis, name in AXES.items()}
        shape = [sizes.get(axis, 1) for axis in POINTS[address.point].shape.split()]
        return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(str(address).encode())))
