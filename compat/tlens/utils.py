"""transformer_lens.utils: the older name of `utilities`, with everything in it."""

from compat.tlens.utilities import *  # noqa: F403
from compat.tlens.utilities.hf_utils import __getattr__  # noqa: F401  CACHE_DIR, which lived here in 2.x
