"""The demo's picture: an induction head's attention and the patching heat map, one column a way of running."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend is chosen first)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.image import AxesImage  # noqa: E402

Results = Mapping[str, np.ndarray]


def draw(runs: Mapping[str, Results], path: Path) -> Path:
    """Draw each run's results in a column and write the PNG; returns its path."""
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 11})
    figure, axes = plt.subplots(2, len(runs), figsize=(6.2 * len(runs), 11.6), squeeze=False, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.15, w_pad=0.1)
    for column, (title, results) in enumerate(runs.items()):
        pattern = _draw_pattern(axes[0, column], results)
        patching = _draw_patching(axes[1, column], results)
        axes[0, column].annotate(
            title, (0.5, 1.12), xycoords="axes fraction", ha="center", fontsize=14, fontweight="bold"
        )
    figure.colorbar(pattern, ax=axes[0, :], shrink=0.7, label="attention")
    figure.colorbar(patching, ax=axes[1, :], shrink=0.7, label="share of the clean answer restored")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _draw_pattern(axes: Axes, results: Results) -> AxesImage:
    """Attention of the strongest induction head over random tokens that repeat once."""
    layer, head = results["strongest induction head"]
    image = axes.imshow(results["attention pattern"], cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(f"strongest induction head, L{layer}H{head}: a bright stripe")
    axes.set_xlabel("attends to position (30 random tokens, twice)")
    axes.set_ylabel("from position")
    return image


def _draw_patching(axes: Axes, results: Results) -> AxesImage:
    """How much of the clean answer returns when one layer's stream is patched at one position."""
    image = axes.imshow(
        results["patching"], cmap="RdBu", vmin=-1, vmax=1, aspect="auto", origin="lower", interpolation="nearest"
    )
    axes.set_title("residual stream patched before each layer, at each position")
    tokens = [str(token).strip() for token in results["tokens"]]
    axes.set_xticks(range(len(tokens)), tokens, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_ylabel("layer")
    return image
