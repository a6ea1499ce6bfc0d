"""TransformerLens' names over our engine: `import compat.tlens as transformer_lens`.

Submodules have TransformerLens' names too. The class `HookedTransformer` and the submodule of the same name share an
attribute; importing the submodule first does not hide the class.
"""
from __future__ import annotations

from compat.tlens import components, hook_points, loading_from_pretrained, patching, utilities, utils
from compat.tlens import loading_from_pretrained as loading
from compat.tlens.ActivationCache import ActivationCache
from compat.tlens.FactoredMatrix import FactoredMatrix
from compat.tlens.HookedRootModule import HookedRootModule
from compat.tlens.HookedTransformer import HookedTransformer
from compat.tlens.HookedTransformerConfig import HookedTransformerConfig
from compat.tlens.past_key_value_caching import (
    HookedTransformerKeyValueCache,
    HookedTransformerKeyValueCacheEntry,
    TransformerLensKeyValueCache,
    TransformerLensKeyValueCacheEntry,
)

EasyTransformer = HookedTransformer
EasyTransformerConfig = HookedTransformerConfig
EasyTransformerKeyValueCache = HookedTransformerKeyValueCache
EasyTransformerKeyValueCacheEntry = HookedTransformerKeyValueCacheEntry
