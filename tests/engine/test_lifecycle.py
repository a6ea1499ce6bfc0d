"""A run leaves nothing behind, however it ends, and costs nothing where it has no taps."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.eager.engine import EagerEngine
from engine.errors import BadInput, BadReplacement, CompatError, Refused
from engine.points import Address
from engine.seam import Batch
from engine.taps import Tap, Taps
from tests.engine import tiny

BATCH = Batch(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]))


class UsersOwn(Exception):
    pass


def the_users_function(x: Tensor) -> Tensor:
    raise UsersOwn("from the user's own line")


def stop_early(engine: EagerEngine) -> None:
    engine.run(BATCH, taps_everywhere(engine), stop=2)


def start_late(engine: EagerEngine) -> None:
    engine.run(BATCH, taps_everywhere(engine), start=(1, torch.ones(1, 8, engine.facts.d_model)))


def raise_in_a_tap(engine: EagerEngine) -> None:
    engine.run(BATCH, [*taps_everywhere(engine), Tap(Address("attn_probs", 1), the_users_function)])


def raise_in_a_piece(engine: EagerEngine) -> None:
    raising = Tap(Address("resid_post", 1), the_users_function)
    engine.run(BATCH, [raising], start=(1, torch.ones(1, 8, engine.facts.d_model)), stop=2, grad=True)


def replace_wrongly(engine: EagerEngine) -> None:
    engine.run(BATCH, [Tap(Address("resid_post", 1), lambda x: x[:, :2])])


def tap_what_is_not_there(engine: EagerEngine) -> None:
    engine.run(BATCH, [*taps_everywhere(engine), Tap(Address("resid_post", 99), lambda x: x)])


def give_a_wrong_mask(engine: EagerEngine) -> None:
    engine.run(Batch(BATCH.tokens, torch.ones(1, 3)), taps_everywhere(engine))


def miss_a_point(engine: EagerEngine) -> None:
    taps = Taps()
    taps.add(Tap(Address("resid_post", 1), lambda x: taps.add(Tap(Address("q", 0), lambda x: x))))
    engine.run(BATCH, taps)


def abandon_a_generation(engine: EagerEngine) -> None:
    steps = engine.generate(BATCH, lambda step: taps_everywhere(engine), lambda logits: logits.argmax(-1))
    next(steps)
    steps.close()


ENDINGS: dict[Callable[[EagerEngine], None], type[Exception] | None] = {
    lambda engine: engine.run(BATCH, taps_everywhere(engine)): None,
    lambda engine: engine.run(BATCH, taps_everywhere(engine), grad=True).sum().backward(): None,
    stop_early: None,
    start_late: None,
    abandon_a_generation: None,
    raise_in_a_tap: UsersOwn,
    raise_in_a_piece: UsersOwn,
    replace_wrongly: BadReplacement,
    tap_what_is_not_there: Refused,
    give_a_wrong_mask: BadInput,
    miss_a_point: CompatError,
}


def taps_everywhere(engine: EagerEngine) -> list[Tap]:
    return [Tap(address, lambda x: None) for address in tiny.addresses(engine, tiny.BRANCHES)]


def test_no_run_leaves_a_hook_or_a_patched_forward_behind(name: str, engine: EagerEngine, reference: Any) -> None:
    with torch.no_grad():
        expected = reference(BATCH.tokens).logits
    for ending, error in ENDINGS.items():
        if error is None:
            ending(engine)
        else:
            with pytest.raises(error):
                ending(engine)
        assert tiny.hooks_on(engine.model) == 0, ending
        with torch.no_grad():
            assert torch.equal(engine.model(BATCH.tokens).logits, expected), ending
        assert torch.equal(engine.run(BATCH, ()), expected), ending
    engine.model.zero_grad()


@pytest.mark.parametrize("name", tiny.FEW)
def test_what_a_tap_raises_comes_through_untouched_with_the_users_own_line(name: str, engine: EagerEngine) -> None:
    mine = UsersOwn("mine")

    def raise_mine(x: Tensor) -> None:
        raise mine

    for address in tiny.addresses(engine):
        if address.layer in (None, 1):
            with pytest.raises(UsersOwn) as caught:
                engine.run(BATCH, [Tap(address, raise_mine)])
            assert caught.value is mine
            assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "raise_mine", address


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration, AttributeError])
def test_not_even_an_exception_that_something_may_swallow_is_lost(error: type[BaseException]) -> None:
    engine = tiny.new_engine("gpt2")

    def raise_it(x: Tensor) -> None:
        raise error

    for point in ("resid_pre", "attn_scores", "mlp_out"):
        with pytest.raises(error):
            engine.run(BATCH, [Tap(Address(point, 1), raise_it)])
    assert tiny.hooks_on(engine.model) == 0


def test_hooks_that_were_there_before_stay_and_still_fire(name: str) -> None:
    engine, calls = tiny.new_engine(name), []
    engine.tree.layers[1].block.register_forward_hook(lambda *_: calls.append(1) or None)
    before = tiny.hooks_on(engine.model)
    engine.run(BATCH, taps_everywhere(engine))
    assert tiny.hooks_on(engine.model) == before == 1 and calls == [1]


def test_a_forward_that_was_patched_before_is_put_back(name: str) -> None:
    engine = tiny.new_engine(name)
    block, calls = engine.tree.layers[0].block, []
    own = block.forward
    block.forward = patched = lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs)
    plain = engine.run(BATCH, ())
    resid = engine.run(BATCH, (), stop=2)
    assert torch.equal(engine.run(BATCH, (), start=(2, resid)), plain)
    assert block.forward is patched and len(calls) == 2


def test_only_modules_that_a_tap_needs_are_hooked(engine: EagerEngine) -> None:
    counts = []
    engine.run(BATCH, [Tap(Address("resid_post", 1), lambda x: counts.append(hooked_layers(engine)), reads=True)])
    assert counts == [{1}]


def hooked_layers(engine: EagerEngine) -> set[int]:
    return {layer.index for layer in engine.tree.layers if tiny.hooks_on(layer.block)}


def test_two_threads_run_one_engine_side_by_side(engine: EagerEngine) -> None:
    """Each thread's taps see that thread's values: one runs whole forwards, the other pieces that pass by two layers"""
    plain, resid = engine.run(BATCH, ()), engine.run(BATCH, (), stop=2)
    wrong: list[str] = []

    def whole() -> None:
        for i in range(12):
            edited = engine.run(BATCH, [Tap(Address("resid_post", 0), lambda x: x * 2 if i % 2 else None)])
            if torch.equal(edited, plain) == bool(i % 2):
                wrong.append(f"whole {i}")

    def piece() -> None:
        for i in range(12):
            if not torch.equal(engine.run(BATCH, (), start=(2, resid)), plain):
                wrong.append(f"piece {i}")

    threads = [threading.Thread(target=work) for work in (whole, piece)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and tiny.hooks_on(engine.model) == 0
