"""The tables in docs/points.md and PORTING.md, made from the code's own tables.

`python -m docs.tables --write` writes them; without `--write` it says which are out of date, and exits with 1 if any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from engine.points import POINTS, Point
from engine.processed import CONTRIBUTIONS, STREAM, STREAM_COPIES
from mappers import tlens as mapper

ROOT = Path(__file__).parents[1]
COMMAND = "python -m docs.tables --write"
BEGIN, END = f"<!-- table, made by `{COMMAND}` -->", "<!-- end of table -->"

# What the families have; a test holds each row against a checkpoint of tests/hub_families.py.
_DECODER = (mapper.PRE_NORMS, mapper.ROTARY, mapper.SEQUENTIAL, mapper.GATED)
_GPT2 = (mapper.PRE_NORMS, mapper.LEARNED, mapper.SEQUENTIAL, mapper.UNGATED)
_PARALLEL = (mapper.PRE_NORMS, mapper.ROTARY, mapper.UNGATED)
_OLMO2 = (mapper.LATE_NORMS, mapper.ROTARY, mapper.SEQUENTIAL, mapper.GATED, mapper.QK_NORM)
FAMILIES: dict[str, tuple[mapper.Trait, ...]] = {
    "GPT-2": _GPT2,
    "Pythia": _PARALLEL,
    "Llama": _DECODER,
    "Qwen3": (*_DECODER, mapper.QK_NORM),
    "Gemma 2": (*_DECODER, mapper.POST_NORMS),
    "GPT-Neo": _GPT2,
    "GPT-J": _PARALLEL,
    "OPT": _GPT2,
    "Bloom": (mapper.EMBED_NORM, mapper.PRE_NORMS, mapper.ALIBI, mapper.SEQUENTIAL, mapper.UNGATED),
    "Mistral": _DECODER,
    "Mixtral": (*_DECODER, mapper.MOE),
    "Qwen2": _DECODER,
    "Gemma": _DECODER,
    "Gemma 3": (*_DECODER, mapper.QK_NORM, mapper.POST_NORMS),
    "Phi": _PARALLEL,
    "Phi-3": _DECODER,
    "OLMo": _DECODER,
    "OLMo 2": _OLMO2,
    "Olmo 3": _OLMO2,
    "OLMoE": (*_DECODER, mapper.QK_NORM, mapper.MOE),
    "GPT-OSS": (*_DECODER, mapper.MOE),
    "Apertus": (mapper.PRE_NORMS, mapper.ROTARY, mapper.SEQUENTIAL, mapper.UNGATED, mapper.QK_NORM),
}

# What `from_pretrained` shows of the raw value; the notes under the tables say what the words mean.
UNCHANGED, CENTRED = "=", "centred"
VIEWS: dict[str, str] = {
    **dict.fromkeys((*CONTRIBUTIONS, *STREAM, *STREAM_COPIES), CENTRED),
    **dict.fromkeys(("value", "z"), "minus c"),
    "attn_result": "minus c W_O, centred",
    "final_norm": "final_norm_normalized",
    **dict.fromkeys(("lm_head", "logits"), "centred over V"),
}
VIEW_NOTES = """\
b batch, p position, D d_model, H query heads, K key/value heads, dh d_head, M d_mlp, E experts, V d_vocab, q and k query and key
positions. "View" is what `from_pretrained` shows of the raw value; `from_pretrained_no_processing` shows it as it is.

- `=`: the value itself.
- centred: minus its mean over D, on LayerNorm models; RMSNorm models are not centred (`center_writing_weights`).
- minus c: minus the folded value bias, c = b_V + ln1.b W_V (`fold_value_biases`). Zero where a family has no biases.
- final_norm_normalized: the value before the final norm's gain and bias, which are in `W_U` and `b_U` then (`fold_ln`).
- centred over V: minus its mean over the vocabulary, unless the model soft-caps its logits (`center_unembed`)."""


def view(point: str) -> str:
    """The view of a point, in a word."""
    return VIEWS.get(point, UNCHANGED)


def where(trait: mapper.Trait) -> str:
    """What a family must have for a name to be there, as a cell."""
    return trait.name or "everywhere"


def families_table() -> str:
    """One row a family, with what it has of what the names hang on."""
    rows = [(name, "; ".join(trait.name for trait in traits)) for name, traits in FAMILIES.items()]
    return table(("family", "what it has"), rows)


def names_table() -> str:
    """One row a HookedTransformer name, in the order of `hook_dict`."""
    rows = [
        (
            code(f"blocks.L.{row.name}" if row.layered else row.name),
            code(row.point),
            POINTS[row.point].shape,
            code(row.flag) if row.flag else "",
            where(row.has),
            view(row.point),
        )
        for row in mapper.ROWS
    ]
    return table(("TransformerLens name", "point", "shape", "flag", "where there is a", "view"), rows)


def points_table() -> str:
    """One row a point, in the order of a forward."""
    rows = [
        (code(point.name), point.shape, kind(point), point.meaning, names_of(point), view(point.name))
        for point in POINTS.values()
    ]
    return table(("point", "shape", "kind", "what it is", "TransformerLens names", "view"), rows)


def kind(point: Point) -> str:
    return ("derived" if point.derived else "boundary") + ("" if point.layered else ", once")


def names_of(point: Point) -> str:
    rows = [row for row in (*mapper.ROWS, *mapper.ALIASES) if row.point == point.name]
    return ", ".join(dict.fromkeys(code(row.name) for row in rows))


def unmapped_table() -> str:
    """One row a name of the Bridge that has no point."""
    rows = [(code(f"blocks.L.{row.name}" if row.layered else row.name), row.reason) for row in mapper.UNMAPPED]
    return table(("name", "why, and what to use"), rows)


def code(text: str) -> str:
    return f"`{text}`"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = tuple(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


POINTS_PAGE = f"""\
# The points

Every place in a decoder where a value can be read or written, in the order of a forward. A point that every layer has
is addressed with one: `resid_post.10`. A boundary point is the input or output of a module or a step of attention; a
derived point is computed from one with the layer's weights, and an edit of it is carried back; "once" marks a point
outside the layers. The names are TransformerLens' own first, then its Bridge's; a layer's names begin with `blocks.L.`.

{VIEW_NOTES}

{{points}}

Names of the Bridge that have no point:

{{unmapped}}

This page is made by `{COMMAND}`.
"""


def pages() -> dict[Path, str]:
    """Each page with a table -> what it should hold."""
    porting = ROOT / "PORTING.md"
    return {
        ROOT / "docs" / "points.md": POINTS_PAGE.format(points=points_table(), unmapped=unmapped_table()),
        porting: with_table(porting.read_text(), f"{VIEW_NOTES}\n\n{names_table()}\n\nThe families that TransformerLens 3.9 loads:\n\n{families_table()}"),
    }


def with_table(page: str, content: str) -> str:
    """The page with what stands between its marks replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """The command line; returns the exit code."""
    stale = [path for path, content in pages().items() if not path.exists() or path.read_text() != content]
    if "--write" in sys.argv[1:]:
        for path in stale:
            path.write_text(pages()[path])
            print(f"wrote {path.relative_to(ROOT)}")
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date: {COMMAND}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
