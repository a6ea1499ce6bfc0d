"""The small tools, with no other library: what they promise beyond giving the original's numbers."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compat.tlens import utilities, utils
from compat.tlens.utilities import devices, hf_utils
from engine.errors import CompatError, Refused


def test_both_names_give_the_same_things() -> None:
    assert len(utilities.__all__) > 60
    assert all(getattr(utils, name) is getattr(utilities, name) for name in utilities.__all__)


def test_a_star_import_leaves_the_built_ins_alone() -> None:
    names: dict[str, Any] = {}
    exec("from compat.tlens.utils import *", names)
    assert "get_act_name" in names and "Slice" in names
    assert "slice" not in names and "torch" not in names


def test_importing_them_loads_no_optional_package() -> None:
    code = "import sys, compat.tlens.utils, compat.tlens.patching; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"datasets", "pandas", "transformer_lens"} & set(loaded)


@pytest.mark.parametrize("name", ["aliases", "architectures", "bridge_components", "quantization", "tracr"])
def test_a_submodule_left_out_can_be_imported_and_refuses_its_names(name: str) -> None:
    module = importlib.import_module(f"compat.tlens.utilities.{name}")
    with pytest.raises(Refused, match="Not served here") as caught:
        module.anything  # noqa: B018
    assert isinstance(caught.value, ImportError)


class FakeModel:
    def __init__(self, tokenizer: Any) -> None:
        self.cfg = SimpleNamespace(default_prepend_bos=True)
        self.tokenizer = tokenizer


def test_overridden_defaults_come_back_after_an_exception() -> None:
    model = FakeModel(SimpleNamespace(padding_side="right"))
    with pytest.raises(ZeroDivisionError):
        with utils.LocallyOverridenDefaults(model, prepend_bos=False, padding_side="left"):
            assert (model.cfg.default_prepend_bos, model.tokenizer.padding_side) == (False, "left")
            1 / 0  # noqa: B018
    assert (model.cfg.default_prepend_bos, model.tokenizer.padding_side) == (True, "right")


def test_an_invalid_default_changes_nothing() -> None:
    model = FakeModel(SimpleNamespace(padding_side="right"))
    with pytest.raises(AssertionError, match="padding_side"):
        with utils.LocallyOverridenDefaults(model, prepend_bos=False, padding_side="middle"):
            pass
    assert model.cfg.default_prepend_bos is True
    with pytest.raises(AssertionError, match="prepend_bos, padding_side"):
        utils.LocallyOverridenDefaults(model, bos=True)


def test_a_padding_side_is_ignored_without_a_tokenizer_and_none_keeps_the_default() -> None:
    model = FakeModel(None)
    with utils.LocallyOverridenDefaults(model, prepend_bos=None, padding_side="left"):
        assert model.cfg.default_prepend_bos is True


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install datasets") as caught:
        utils.get_dataset("pile")
    assert isinstance(caught.value, CompatError)


def test_an_unknown_data_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="c4_code"):
        utils.get_dataset("no such set")


@pytest.fixture
def hub_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Answers downloads from a folder, and records what was asked for."""
    import huggingface_hub

    asked: list[dict[str, Any]] = []

    def hf_hub_download(*, repo_id: str, filename: str, subfolder: str, cache_dir: Any, revision: str = "main") -> str:
        asked.append({"repo_id": repo_id, "subfolder": subfolder, "cache_dir": cache_dir, "revision": revision})
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return SimpleNamespace(folder=tmp_path, asked=asked)


def test_a_downloaded_file_is_read_by_its_kind(hub_file: Any, capsys: pytest.CaptureFixture) -> None:
    (hub_file.folder / "a.json").write_text(json.dumps({"n": 3}))
    torch.save({"w": torch.ones(2)}, hub_file.folder / "a.pth")
    torch.save([1], hub_file.folder / "a.bin")
    assert utils.download_file_from_hf("repo", "a.json") == {"n": 3}
    assert torch.equal(utils.download_file_from_hf("repo", "a.pth")["w"], torch.ones(2))
    assert utils.download_file_from_hf("repo", "a.bin", force_is_torch=True) == [1]
    assert utils.download_file_from_hf("repo", "a.bin") == str(hub_file.folder / "a.bin")
    assert "File type not supported: bin" in capsys.readouterr().out


def test_a_download_passes_on_the_revision_and_drops_unknown_keywords(hub_file: Any) -> None:
    (hub_file.folder / "a.json").write_text("{}")
    utils.download_file_from_hf("repo", "a.json", subfolder="s", revision="v2", colour="red")
    assert hub_file.asked == [{"repo_id": "repo", "subfolder": "s", "cache_dir": None, "revision": "v2"}]


def test_clearing_the_cache_deletes_only_the_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    (cache / "models--x").mkdir(parents=True)
    (tmp_path / "else").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert utils.CACHE_DIR == hf_utils.CACHE_DIR == str(cache)
    utils.clear_huggingface_cache()
    assert not cache.exists() and (tmp_path / "else").exists()


class TooMany(Exception):
    response = SimpleNamespace(status_code=429, headers={"Retry-After": "7"})


def test_the_hub_is_asked_again_only_after_429(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    answers = iter([TooMany(), TooMany(), "file"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert hf_utils.call_hf_with_retry(ask) == "file" and waits == [7.0, 7.0]
    with pytest.raises(ZeroDivisionError):
        hf_utils.call_hf_with_retry(lambda: 1 / 0)
    assert waits == [7.0, 7.0]


def test_mps_is_warned_of_once_and_not_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_warned", set())
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with pytest.warns(UserWarning, match="silently wrong") as caught:
        utils.warn_if_mps("mps")
        utils.warn_if_mps(torch.device("mps"))
    assert len(caught) == 1
    monkeypatch.setattr(devices, "_warned", set())
    monkeypatch.setenv("TRANSFORMERLENS_ALLOW_MPS", "1")
    utils.warn_if_mps("mps")
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    with pytest.warns(UserWarning, match="multiplies non-contiguous"):
        utils.warn_if_mps("mps")


def test_moving_a_model_updates_its_config(capsys: pytest.CaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    model.cfg = SimpleNamespace(device=None, dtype=torch.float32)
    assert utils.move_to_and_update_config(model, torch.float64) is model
    assert model.weight.dtype == model.cfg.dtype == torch.float64
    utils.move_to_and_update_config(model, "cpu", print_details=False)
    assert model.cfg.device == "cpu"
    assert capsys.readouterr().out == "Changing model dtype to torch.float64\n"


def test_a_swapped_parameter_gets_its_values_back() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ZeroDivisionError):
        with utils.temporarily_swap_parameter(parameter, torch.zeros(3)) as swapped:
            assert swapped is parameter and not parameter.any()
            1 / 0  # noqa: B018
    assert parameter.all()
    with pytest.raises(ValueError, match="shape"):
        utils.temporarily_swap_parameter(parameter, torch.zeros(2)).__enter__()


def test_blocks_spread_over_devices_without_passing_the_last() -> None:
    cfg = SimpleNamespace(device="cuda:1", n_devices=8, n_layers=62)
    used = [utils.get_device_for_block_index(layer, cfg).index for layer in range(62)]
    assert used == sorted(used) and set(used) == set(range(1, 9))
    assert utils.get_device_for_block_index(61, cfg, "cpu") == torch.device("cpu")


IMPOSSIBLE_MAPS = [(None, {"": 0}, "cuda"), (None, {"": "disk"}, None), (None, {"a": "cpu", "b": 0}, None)]


@pytest.mark.parametrize("arguments", [*IMPOSSIBLE_MAPS, (99, None, None)])
def test_device_maps_that_cannot_work_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError):
        utils.resolve_device_map(*arguments)


def test_a_prompt_tester_prints_brackets_of_tokens_as_they_are(capsys: pytest.CaptureFixture) -> None:
    words = ["[b]", "[/x]", " c"]
    model = SimpleNamespace(
        to_tokens=lambda text, prepend_bos: torch.tensor([[0]] if isinstance(text, str) else [[1]]),
        to_str_tokens=lambda text, prepend_bos: ["[b]"] if text == "p" else ["[/x]"],
        to_string=lambda token: words[token],
    )
    tester = type("Model", (SimpleNamespace,), {"__call__": lambda self, tokens: torch.eye(3)[tokens] * 2.0})
    utils.test_prompt("p", "[/x]", tester(**vars(model)), top_k=2)
    shown = capsys.readouterr().out
    assert "Token: |[/x]|" in shown and "Top 0th token. Logit:  2.00 Prob: 78.70% Token: |[b]|" in shown


def test_a_corner_of_a_factored_matrix_has_the_size_asked_for() -> None:
    # TransformerLens 3.9 cuts every corner down to 3 once more.
    matrix = importlib.import_module("compat.tlens.FactoredMatrix").FactoredMatrix(torch.eye(7), torch.eye(7))
    assert torch.equal(utils.get_matrix_corner(matrix, 5), torch.eye(5))


def test_gpu_memory_is_printed_in_gibibytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    # TransformerLens 3.9 divides by 2e30, and so always prints 0.
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * 2**29)
    utils.print_gpu_mem("after load")
    assert capsys.readouterr().out == "after load ~ 1.5 GiB allocated on GPU.\n"
