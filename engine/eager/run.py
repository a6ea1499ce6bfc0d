"""One forward of the eager engine: puts its taps on modules for as long as it runs, and carries values between them.

Which modules a point needs, and what happens there, is `places.py`. Only places that a tap needs cost anything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from engine.eager.inside import WATCHED
from engine.eager.places import HANDLERS, INSIDE, PLACES
from engine.eager.resolve import Layer, Norm, Tree
from engine.points import Address
from engine.seam import Weights
from engine.taps import Taps, same

_RECORDED = ("block.in", "mlp_norm.in")  # what later places of a layer need to have seen
BEFORE_LAYERS = ("tokens", "embed_norm_scale", "embed_norm_normalized", "embeddings", "pos_embed")

_current: ContextVar[Run | None] = ContextVar("run", default=None)


def current_run() -> Run | None:
    """The run whose forward is under way here, unless one of its taps is."""
    run = _current.get()
    return None if run is None or run.firing else run


class State:
    """What one layer carries between its modules during one forward. `layer` is None for what lies outside the blocks."""

    def __init__(self, layer: Layer | None) -> None:
        self.layer = layer
        self.index = None if layer is None else layer.index
        self.stream: Tensor | None = None  # [b, p, D], what the attention branch reads
        self.mlp_stream: Tensor | None = None  # [b, p, D], what the MLP branch reads
        self.override: dict[str, Tensor] = {}  # q, k, v, attn: values that replace what the module is about to compute

    def norm(self, role: str) -> Norm | None:
        return None if self.layer is None else self.layer.norms.get(role)


class Run:
    """The taps of one forward, armed on a tree. Use as a context manager around the model's forward."""

    def __init__(
        self, tree: Tree, weights: Weights, taps: Taps, check: Callable[[Address], None], *, grad: bool, batch_size: int
    ) -> None:
        """`check` raises for an address that cannot be served."""
        self.tree, self.weights, self.taps, self.grad, self.batch_size = tree, weights, taps, grad, batch_size
        self.check, self.firing = check, False
        self.outside = State(None)
        self.states = [State(layer) for layer in tree.layers]
        self._by_attention = {id(state.layer.inner): state for state in self.states}
        self._armed: set[tuple[int, str]] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Run:
        for module in (self.tree.model, self.tree.trunk):  # a hook on a running module fires only if it had one at start
            self._handles.append(module.register_forward_hook(_nothing))
        self._token = _current.set(self)
        return self

    def arm_all(self, first_layer: int | None = None) -> None:
        """Arms the taps known so far, and from now on each one that is added; none before `first_layer`, if given."""
        self._first_layer = first_layer
        for address in self.taps.addresses():
            self.arm(address)
        self.taps.begin(self.arm)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
        self.taps.on_add = None
        for handle in reversed(self._handles):
            handle.remove()
        self.states = []

    def on_input(self, module: nn.Module, act: Callable[[Tensor], Tensor | None]) -> None:
        """Calls `act` with the hidden states that enter `module`; what it returns replaces them."""

        def hook(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if current_run() is not self:
                return None
            if args:
                new = act(args[0])
                return None if new is None or new is args[0] else ((new, *args[1:]), kwargs)
            name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            new = act(kwargs[name])
            return None if new is None or new is kwargs[name] else (args, {**kwargs, name: new})

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def on_output(self, module: nn.Module, act: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Calls `act` with `module`'s output and input; what it returns replaces the output (of a tuple, the first)."""

        def hook(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            if current_run() is not self:
                return None
            value = output[0] if isinstance(output, tuple) else output
            new = act(value, args[0] if args else next(iter(kwargs.values())))
            if new is value:
                return None
            return (new, *output[1:]) if isinstance(output, tuple) else new

        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def arm(self, address: Address) -> None:
        """Puts hooks where `address` needs them, and on its layer what a tap that is added there later will need."""
        self.check(address)
        if self._first_layer is not None and (
            address.point in BEFORE_LAYERS if address.layer is None else address.layer < self._first_layer
        ):
            return  # what runs there is a stand-in, not the model
        state = self.outside if address.layer is None else self.states[address.layer]
        if state.layer is not None and (id(state.layer.block), "around") not in self._armed:
            self._armed.add((id(state.layer.block), "around"))
            for around in (state.layer.block, state.layer.attn, state.layer.mlp or state.layer.block):
                self._handles.append(around.register_forward_hook(_nothing))
            self._arm_places(_RECORDED, state)
        self._arm_places(PLACES[address.point], state)
        if address.point in WATCHED and (address.point not in INSIDE or not self.tree.exchanged):
            self._watch(*WATCHED[address.point], state)

    def _watch(self, role: str, mode: type, state: State) -> None:
        """Runs the forward of a module under a mode that sees the torch functions it calls."""
        module = state.layer.module(role)
        if (id(module), role) in self._armed:
            return
        self._armed.add((id(module), role))
        before = vars(module).get("forward")
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            if current_run() is not self:
                return forward(*args, **kwargs)
            with mode(self, state, kwargs):
                return forward(*args, **kwargs)

        module.forward = watched
        self._handles.append(_Restored(module, before))

    def _arm_places(self, places: tuple[str, ...], state: State) -> None:
        for place in places:
            module = self._module(place.split(".")[0], state)
            if module is not None and (id(module), place) not in self._armed:
                self._armed.add((id(module), place))
                self._install(place, module, state)

    def _install(self, place: str, module: nn.Module, state: State) -> None:
        handler = HANDLERS[place]
        if place == "router.out":
            hook = lambda _, args, out: handler(self, state, out, args[0]) if current_run() is self else None  # noqa: E731
            self._handles.append(module.register_forward_hook(hook))
        elif place.endswith(".in"):
            self.on_input(module, lambda x: self._by_rows(state, lambda x: handler(self, state, x), x))
        else:
            self.on_output(module, lambda y, x: self._by_rows(state, lambda y, x: handler(self, state, y, x), y, x))

    def _by_rows(self, state: State, act: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """Calls `act` on values with a batch axis, where a family has made one axis of batch and position."""
        if state.layer is None or values[0].dim() != 2:
            return act(*values)
        return act(*(value.unflatten(0, (self.batch_size, -1)) for value in values)).flatten(0, 1)

    def _module(self, role: str, state: State) -> nn.Module | None:
        if state.layer is not None:
            return state.layer.module(role)
        return self.tree.module(role)

    def attention_state(self, module: nn.Module) -> State | None:
        return self._by_attention.get(id(module))

    def tapped(self, point: str, state: State) -> bool:
        return Address(point, state.index) in self.taps

    def writes(self, point: str, state: State) -> bool:
        return self.taps.writes(Address(point, state.index))

    def fire(self, point: str, state: State, value: Tensor) -> Tensor:
        """Runs the taps at a point of a layer; the forward continues with what comes back."""
        address = Address(point, state.index)
        if address not in self.taps:
            return value
        writes = self.taps.writes(address)
        if self.grad and writes:
            value = value.clone()  # an edit in place must touch neither what autograd saved nor a leaf
        apart = point in self.tree.edited_in_place  # the model goes on to overwrite the tensor that it is given back
        self.firing = True
        try:
            result = self.taps.fire(address, value.clone() if apart else value)
        finally:
            self.firing = False
        return result if not apart else result.clone() if writes else value

    def fire_copy(self, point: str, state: State, value: Tensor) -> tuple[Tensor, bool]:
        """Fires on a copy, for a value that the model does not itself hold; also tells whether it must be carried back.

        With gradients on it always must be, so that the gradient of the very tensor handed out exists.
        """
        if not self.writes(point, state):
            return self.fire(point, state, value), False
        result = self.fire(point, state, value if self.grad else value.clone())
        return result, self.grad or not same(value, result)


class _Restored:
    """Gives a module its own forward back when a run is over."""

    def __init__(self, module: nn.Module, before: Any) -> None:
        self._module, self._before = module, before

    def remove(self) -> None:
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before


def _nothing(*_: object) -> None:
    return None
