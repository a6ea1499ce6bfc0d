"""`python -m demo.reference program.py [args]`: run a program under the real TransformerLens.

TransformerLens 3.9 knows its models by a list of names, which has no SmolLM2. With the name added it builds its
HookedTransformerConfig from the checkpoint and converts the weights as for any Llama.
"""

from __future__ import annotations

import runpy
import sys
import warnings

from demo.real_models import SMOLLM2


def main() -> None:
    for deprecated in ("HookedTransformer", "The 'utils' module"):
        warnings.filterwarnings("ignore", deprecated, DeprecationWarning)
    from transformer_lens import loading

    loading.OFFICIAL_MODEL_NAMES.append(SMOLLM2)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
