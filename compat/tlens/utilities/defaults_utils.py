"""Arguments that fall back on a model's own setting, and the scope that overrides such a setting for a while."""

from __future__ import annotations

from typing import Any

from compat.tlens.errors import require
from compat.tlens.utilities.attribute_utils import get_nested_attr, set_nested_attr

USE_DEFAULT_VALUE = None

_PLACES = {"prepend_bos": "model.cfg.default_prepend_bos", "padding_side": "model.tokenizer.padding_side"}
_VALID = {"prepend_bos": [USE_DEFAULT_VALUE, True, False], "padding_side": [USE_DEFAULT_VALUE, "left", "right"]}


def override_or_use_default_value(default_flag: Any, override: Any | None = None) -> Any:
    """`override`, or `default_flag` where it is None."""
    return default_flag if override is None else override


class LocallyOverridenDefaults:
    """`with LocallyOverridenDefaults(model, prepend_bos=..., padding_side=...)`: the model's defaults for the block.

    None keeps the present value. Both are put back on exit, also after an exception, and nothing is set when one is
    invalid (AssertionError). A padding side is ignored by a model that has no tokenizer.
    """

    def __init__(self, model: Any, **overrides: Any) -> None:
        for name in overrides:
            require(name in _PLACES, f"{name!r} is no default that can be overridden; these are: {', '.join(_PLACES)}")
        self.model = model
        self.overrides = overrides
        self._saved: dict[str, Any] = {}

    def __enter__(self) -> None:
        if self.model.tokenizer is None:
            active = {name: value for name, value in self.overrides.items() if name != "padding_side"}
        else:
            active = self.overrides
        for name, value in active.items():
            require(value in _VALID[name], f"{name} must be one of {_VALID[name]}, got {value!r}")
        for name, value in active.items():
            self._saved[name] = get_nested_attr(self, _PLACES[name])
            set_nested_attr(self, _PLACES[name], override_or_use_default_value(self._saved[name], value))

    def __exit__(self, *exception: object) -> None:
        while self._saved:
            name, value = self._saved.popitem()
            set_nested_attr(self, _PLACES[name], value)
