"""What the pages say is so: tables are current, snippets run, and every name, file and command exists."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from docs import tables
from engine.eager.engine import EagerEngine
from engine.eager.load import load_eager
from engine.points import POINTS, Address
from engine.processed import RAW, Processed, Processing
from mappers import tlens as mapper
from tests.hub import FURTHER_NAMES, NAMES

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "PORTING.md", "docs/architecture.md", "docs/points.md")
CHECKPOINTS = dict(zip(tables.FAMILIES, (*NAMES, *FURTHER_NAMES), strict=True))


def page(name: str) -> str:
    return (ROOT / name).read_text()


@lru_cache(maxsize=None)
def engine_of(family: str) -> EagerEngine:
    return load_eager(CHECKPOINTS[family])


# --- tables


def test_tables_in_the_pages_are_current() -> None:
    stale = [str(path.relative_to(ROOT)) for path, content in tables.pages().items() if path.read_text() != content]
    assert not stale, f"{stale} out of date: run `{tables.COMMAND}`"


def test_a_stale_page_is_told_with_the_command_that_makes_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["tables"])
    monkeypatch.setattr(tables, "pages", lambda: {ROOT / "README.md": "another text"})
    assert tables.main() == 1
    assert capsys.readouterr().out == f"README.md is out of date: {tables.COMMAND}\n"


@pytest.mark.parametrize("family", tables.FAMILIES)
def test_names_in_the_porting_table_are_the_mappers(family: str) -> None:
    facts = engine_of(family).facts
    listed = []
    for line in page("PORTING.md").partition(tables.BEGIN)[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 6 or not cells[0].startswith("`"):
            continue
        name, point, _, flag, where, _ = (cell.strip("`") for cell in cells)
        if where in ("everywhere", *(trait.name for trait in tables.FAMILIES[family])):
            name = name.replace("blocks.L.", "blocks.0.")
            assert mapper.to_address(name, facts).point == point
            assert (mapper.flag(name) or "") == flag
            listed.append(name)
    everything = mapper.names(facts, use_hook_tokens=True)
    assert sorted(listed) == sorted(name for name in everything if not re.match(r"blocks\.[1-9]", name))


@pytest.mark.parametrize("family", tables.FAMILIES)
def test_a_family_in_the_tables_has_the_traits_they_say(family: str) -> None:
    facts = engine_of(family).facts
    for trait in (row.has for row in (*mapper.ROWS, *mapper.ALIASES, *mapper.UNMAPPED)):
        assert trait(facts) == (trait is mapper.EVERY or trait in tables.FAMILIES[family]), trait.name


@pytest.mark.parametrize("family", tables.FAMILIES)
def test_a_family_in_the_tables_is_served_at_every_name(family: str) -> None:
    engine = engine_of(family)
    addresses = [mapper.to_address(name, engine.facts) for name in mapper.names(engine.facts, use_hook_tokens=True)]
    refused = {address.point: engine.refuses(address, "write") for address in addresses}
    facts, expected = engine.facts, set()
    expected |= {"attn_stream_in"} if facts.n_kv_heads != facts.n_heads else set()
    expected |= {"mlp_pre", "mlp_pre_linear", "mlp_act"} if facts.n_experts else set()  # each expert has its own
    expected |= {"router_probs"} if facts.sinks else set()  # GPT-OSS takes the softmax of the picked experts only
    assert {point for point, reason in refused.items() if reason} == expected, refused


@pytest.mark.parametrize("family", ["GPT-2", "Pythia", "Llama", "Gemma 2"])
def test_views_are_what_the_tables_say(family: str) -> None:
    engine = engine_of(family)
    views, raw = Processed(engine, Processing()), Processed(engine, RAW).new_pass()
    for point in POINTS.values():
        address = Address(point.name, 1 if point.layered else None)
        value = torch.randn([SIZES[axis](engine) for axis in point.shape.split()])
        shown = views.new_pass().view(address)
        expected = as_said(engine, address, value)
        found = value if shown is None else shown[0](value)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), point.name
        moved = views.shown_at(address).point
        assert moved == ("final_norm_normalized" if tables.view(point.name) == moved else point.name)
        assert raw.view(address) is None
    assert Processed(engine, RAW).shown_at(Address("final_norm")) == Address("final_norm")


SIZES = {
    "b": lambda engine: 2,
    "p": lambda engine: 5,
    "q": lambda engine: 5,
    "k": lambda engine: 5,
    "1": lambda engine: 1,
    "D": lambda engine: engine.facts.d_model,
    "H": lambda engine: engine.facts.n_heads,
    "K": lambda engine: engine.facts.n_kv_heads,
    "dh": lambda engine: engine.facts.d_head,
    "M": lambda engine: engine.facts.d_mlp,
    "V": lambda engine: engine.facts.d_vocab,
    "E": lambda engine: 5,  # experts, and how many of them a token goes to: these families have none
    "x": lambda engine: 2,
}


@torch.no_grad()
def as_said(engine: EagerEngine, address: Address, value: Tensor) -> Tensor:
    """The view in words, computed from the checkpoint's weights by the formulas that the notes give."""
    said, facts, weights = tables.view(address.point), engine.facts, engine.weights
    centred = value - value.mean(-1, keepdim=True)
    if said == "centred over V":
        return value if facts.logit_softcap is not None else centred
    if said == "centred":
        return centred if facts.norm == "layer" else value
    if not said.startswith("minus c"):
        return value
    norm_bias = weights("attn_norm_bias", address.layer)
    c = weights("v_bias", address.layer) + torch.einsum("d,kde->ke", norm_bias, weights("v", address.layer))
    if address.point != "value":
        c = c.repeat_interleave(facts.n_heads // facts.n_kv_heads, dim=0)
    if address.point != "attn_result":
        return value - c
    value = value - torch.einsum("hd,hdm->hm", c, weights("o", address.layer))
    return value - value.mean(-1, keepdim=True) if facts.norm == "layer" else value


# --- snippets

SNIPPETS = {
    f"{name}, snippet {number}": text
    for name in PAGES
    for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", page(name), re.S | re.M), 1)
}
RUNNER = """\
import contextlib, io, json, sys, traceback
results = {}
for name, text in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(compile(text, name, "exec"), {"__name__": "__main__"})
            results[name] = [None, printed.getvalue()]
        except BaseException:
            results[name] = [traceback.format_exc(), printed.getvalue()]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def ran() -> dict[str, tuple[str | None, str]]:
    """Snippet -> (its traceback or None, what it printed). One process runs them all."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=json.dumps(SNIPPETS), capture_output=True, text=True, cwd=ROOT, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs(snippet: str, ran: dict[str, tuple[str | None, str]]) -> None:
    assert ran[snippet][0] is None, ran[snippet][0]


def test_every_page_for_users_has_a_snippet() -> None:
    assert {name.partition(",")[0] for name in SNIPPETS} == {"README.md", "PORTING.md", "docs/architecture.md"}


def test_the_readmes_program_prints_the_same_under_its_old_import(ran: dict, tmp_path: Path) -> None:
    program = SNIPPETS["README.md, snippet 1"]
    assert program.startswith("import compat.tlens as tl  # was: import transformer_lens as tl\n")
    (tmp_path / "script.py").write_text("import transformer_lens as tl\n" + program.partition("\n")[2])
    command = [sys.executable, "-m", "compat", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == ran["README.md, snippet 1"][1]


# --- names, files, commands


@pytest.mark.parametrize("name", PAGES)
def test_commands_in_a_page_exist(name: str) -> None:
    commands = re.findall(r"(?:`|^    )((?:make|python -m) [^`\n]+)", page(name), re.M)
    targets = re.search(r"^\.PHONY: (.*)$", page("Makefile"), re.M)[1].split()
    assert commands or name == "docs/architecture.md"
    for command in commands:
        words = command.split()
        if words[0] == "make":
            assert words[1] in targets, command
        else:
            module = importlib.util.find_spec(words[2])
            assert module is not None, command
            if module.submodule_search_locations is not None:
                assert importlib.util.find_spec(f"{words[2]}.__main__") is not None, command


@pytest.mark.parametrize("name", PAGES)
def test_files_and_tests_that_a_page_names_exist(name: str) -> None:
    text, folder = page(name), (ROOT / name).parent
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (folder / target).exists(), target
    for path, test in re.findall(r"`((?:tests|engine|compat|mappers|docs|demo)/[\w./]*)(?:::(\w+))?`", text):
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in page(path), f"{path}::{test}"
    everywhere = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for test in re.findall(r"`(test_\w+)`", text):
        assert f"def {test}(" in everywhere, test


def test_the_readme_links_every_page() -> None:
    readme = page("README.md") + page("docs/architecture.md") + page("PORTING.md")
    for target in ("PORTING.md", "docs/architecture.md", "docs/points.md", "LICENSE"):
        assert f"({target})" in readme or f"({Path(target).name})" in readme, target
