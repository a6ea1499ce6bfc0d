"""The demo compares its runs truthfully, and its program gives the same numbers both ways."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from demo import run as demo
from demo.pictures import draw
from demo.real_models import ensure, real_home

RESULTS = {
    "tokens": np.array(["<bos>", " a"]),
    "strongest induction head": np.array([1, 2]),
    "attention pattern": np.tril(np.ones((5, 5))),
    "patching": np.array([[0.0, -4.0], [0.5, 1.0], [0.0, 0.0]]),
}


def fake_run(**changed: np.ndarray) -> demo.Run:
    return demo.Run(demo.REFERENCE, RESULTS | changed, {"load": 1.0}, 1.0, 2**30)


def test_difference_is_a_share_of_the_references_largest_magnitude() -> None:
    other = fake_run(patching=RESULTS["patching"] + [[0.0, 0.0], [0.2, 0.0], [0.0, 0.0]])
    assert other.difference(fake_run(), "patching") == pytest.approx(0.2 / 4)


def test_different_text_is_no_small_difference() -> None:
    assert fake_run(tokens=np.array(["<bos>", " b"])).difference(fake_run(), "tokens") == float("inf")


def test_runs_agree_only_within_the_tolerance() -> None:
    within, beyond = (fake_run(patching=RESULTS["patching"] + 4 * demo.TOLERANCE * share) for share in (0.9, 1.1))
    assert demo.compare([fake_run(), within])
    assert not demo.compare([fake_run(), within, beyond])


def test_result_that_is_not_a_number_is_a_disagreement() -> None:
    assert not demo.compare([fake_run(), fake_run(), fake_run(patching=RESULTS["patching"] * np.nan)])


def test_picture_has_a_column_for_each_run(tmp_path: Path) -> None:
    one, two = (Image.open(draw(dict.fromkeys(titles, RESULTS), tmp_path / "demo.png")).size for titles in ("a", "bc"))
    assert two[0] > 1.5 * one[0] and two[1] == one[1]


@pytest.mark.slow
def test_demo_program_gives_the_real_librarys_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "OUT", tmp_path)
    ensure(demo.MODEL)
    assert demo.compare([demo.run(way, real_home()) for way in demo.WAYS])
