from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from blobstore.manifests.reference import Reference
from blobstore.operations.compare.compare import Comparison, TensorError
from blobstore.operations.compare.metrics import WorstGroup
from blobstore.operations.ui.compare_page import decibels, group_of, number, page, type_of

VOID = {"meta"}
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "ul", "li"),
    *("dl", "div", "dt", "dd", "span", "small", "table", "thead", "tbody", "tr", "th", "td"),
}


class Page(HTMLParser):
    """A page taken apart: every tag closed in order, cells of each table, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self.titles: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        found = dict(attrs)
        assert len(found) == len(attrs)
        self.tags.append((tag, found))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if "title" in found:
            self.titles.append(found["title"])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)
        if "tr" in self._open:
            cells = self.tables[-1][-1]
            cells[-1] += f" {data}" if self._open[-1] == "small" else data

    def colours(self) -> list[str]:
        return [found["style"] for tag, found in self.tags if tag == "td" and "style" in found]


def tensor(name: str, ratio: float = math.inf, *, nonfinite: int = 0, **facts: Any) -> TensorError:
    """Return a tensor of a ratio in decibels."""
    differs = not math.isinf(ratio)
    default = {
        "type": "int4" if differs else "BF16",
        "group_size": 32 if differs else 0,
        "nbytes": 160 if differs else 512,
        "base_type": "BF16",
        "base_group_size": 0,
        "base_nbytes": 512,
        "shape": (4, 64),
        "squared_error": 1.0 if differs else 0.0,
        "squared_base": 10 ** (ratio / 10) if differs else 0.0,
        "max_abs_error": 0.25 if differs else 0.0,
        "worst": WorstGroup(0.5, 3, 32, 32) if differs else None,
    }
    return TensorError(name=name, nonfinite=nonfinite, **(default | facts))


def compared(*tensors: TensorError, mine: Any = (), yours: Any = ()) -> Comparison:
    return Comparison(
        reference=Reference.parse("packed"),
        base=Reference.parse("base"),
        tensors=tensors,
        only_in_model=tuple(mine),
        only_in_base=tuple(yours),
    )


def parsed(*tensors: TensorError, **names: Any) -> Page:
    return Page(page(compared(*tensors, **names)))


# What the page is


def test_is_whole_without_scripts_and_anything_from_elsewhere() -> None:
    text = page(compared(tensor("model.layers.0.a.weight", 20), tensor("b", 10), mine=["c"]))
    found = Page(text)
    assert {tag for tag, _ in found.tags} == ALLOWED - {"small"}
    assert "http-equiv" in text
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|src=|href=|@import|url\(|\son\w+=", text)
    assert "@media (prefers-color-scheme: dark)" in text
    assert text.isascii()


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "' onmouseover='alert(1)",
        "</title></style></table><h1>",
        "&lt;b&gt; &amp; {title} {body} %s",
        "esc\x1b[2J\x00 lf\n cr\r \u202eoverride \ud800",
        "x" * 70_000,
    ],
)
def test_shows_hostile_names_as_text(name: str) -> None:
    names = [f"{name}.layers.0.w", f"model.layers.0.{name}.weight", f"layers.1.{name}.q", name]
    tensors = [tensor(item, 20) for item in names]
    text = page(compared(*tensors, mine=[name], yours=[name]))
    found = Page(text)
    assert {tag for tag, _ in found.tags} <= ALLOWED
    assert {key for _, keys in found.tags for key in keys} <= {
        *("lang", "charset", "http-equiv", "content", "name", "class", "style", "scope", "title")
    }
    assert sum(tag == "h1" for tag, _ in found.tags) == 1
    assert all(char.isprintable() or char == "\n" for char in text)
    assert len(text) < 20_000
    shown = "".join(found.words)
    assert (name if name.isprintable() and len(name) < 80 else name[:3]) in shown


def test_does_not_depend_on_anything_but_the_comparison() -> None:
    one = compared(tensor("model.layers.0.a.weight", 20))
    assert page(one) == page(one)


# The heat map


def test_has_a_row_a_layer_and_a_column_a_projection() -> None:
    found = parsed(
        tensor("model.layers.0.mlp.up_proj.weight", 20),
        tensor("model.layers.0.self_attn.q_proj.weight", 21),
        tensor("model.layers.10.mlp.up_proj.weight", 22),
        tensor("model.layers.2.self_attn.q_proj.weight", 23),
        tensor("model.layers.2.self_attn.q_proj.bias", 24),
    )
    assert found.tables[0] == [
        ["layer", "mlp.up_proj", "self_attn.q_proj", "self_attn.q_proj.bias"],
        ["0", "20.0", "21.0", ""],
        ["2", "", "23.0", "24.0"],
        ["10", "22.0", "", ""],
    ]


def test_has_a_map_for_each_stack_of_layers() -> None:
    found = parsed(
        tensor("visual.blocks.0.q.weight", 20),
        tensor("model.layers.0.q.weight", 21),
        tensor("model.layers.0.moe.1.q.weight", 22),
        tensor("0.q", 23),
        tensor("h.3", 24),
    )
    heads = [
        word for word in found.words if word in ("visual.blocks", "model.layers", "Layers", "h")
    ]

    assert heads == ["visual.blocks", "model.layers", "Layers", "h"]
    assert found.tables[0] == [["layer", "q"], ["0", "20.0"]]
    assert found.tables[1] == [["layer", "q", "moe.1.q"], ["0", "21.0", "22.0"]]
    assert found.tables[2] == [["layer", "q"], ["0", "23.0"]]
    assert found.tables[3] == [["layer", "(the layer itself)"], ["3", "24.0"]]


def test_folds_experts_into_the_worst_and_the_mean() -> None:
    prefix = "model.layers.4.mlp.experts"
    found = parsed(
        tensor(f"{prefix}.0.up_proj.weight", 20),
        tensor(f"{prefix}.1.up_proj.weight", 15),
        tensor(f"{prefix}.2.up_proj.weight"),
        tensor(f"{prefix}.10.up_proj.weight", 22),
        tensor("experts.0.w", 30),
        tensor("experts.1.w", 31),
    )
    assert found.tables[0] == [["layer", "mlp.experts.*.up_proj"], ["4", "15.0 19.0"]]
    assert found.tables[1] == [["experts.*.w", "30.0 30.5"]]
    assert "worst of 4 experts; mean SNR 19.0 dB" in found.titles[0]
    assert f"{prefix}.1.up_proj.weight" in found.titles[0]


def test_tells_all_about_a_cell_in_its_tooltip() -> None:
    (title,) = parsed(tensor("model.layers.0.q.weight", 20)).titles
    assert title.split("\n") == [
        "model.layers.0.q.weight",
        "int4 g32, base BF16, 5 bits per weight",
        "relative error 0.1, SNR 20.0 dB",
        "largest error 0.25",
        "worst group: 0.5 at row 3, column 32",
    ]


def test_puts_names_without_a_layer_apart_worst_first() -> None:
    found = parsed(
        tensor("model.embed_tokens.weight", 40),
        tensor("lm_head.weight", 30),
        tensor("model.norm.weight"),
        tensor("model.layers.0.q.weight", 20),
        tensor("model.layers.99999999999999999999.q.weight", 10),
    )
    assert found.tables[0] == [["layer", "q"], ["0", "20.0"]]
    assert found.tables[1] == [
        ["model.layers.99999999999999999999.q.weight", "10.0"],
        ["lm_head.weight", "30.0"],
        ["model.embed_tokens.weight", "40.0"],
    ]


def test_leaves_out_tensors_that_are_equal_in_all_layers() -> None:
    found = parsed(
        tensor("model.layers.0.q.weight", 20),
        tensor("model.layers.0.norm.weight"),
        tensor("model.layers.1.q.weight"),
        tensor("model.layers.1.norm.weight"),
        tensor("other.layers.1.norm.weight"),
    )
    assert found.tables[0] == [["layer", "q"], ["0", "20.0"], ["1", "="]]
    assert len(found.tables) == 2


def test_equal_models_have_no_map() -> None:
    found = parsed(tensor("model.layers.0.q.weight"), tensor("x"))
    assert found.tables == []
    assert "All tensors are equal." in found.words


def test_colours_run_from_the_worst_to_the_best() -> None:
    found = parsed(*(tensor(f"l.{layer}.q", ratio) for layer, ratio in enumerate((10, 25, 40))))
    assert found.colours() == [
        "background:#a50026;color:#fff",
        "background:#ffffbf;color:#000",
        "background:#313695;color:#fff",
    ]
    assert "10.0 dB" in found.words
    assert "40.0 dB" in found.words


def test_colours_do_not_exaggerate() -> None:
    found = parsed(tensor("l.0.q", 20), tensor("l.1.q", 20.2))
    assert "17.1 dB" in found.words
    assert "23.1 dB" in found.words
    assert not {"background:#a50026;color:#fff", "background:#313695;color:#fff"} & set(
        found.colours()
    )


def test_marks_tensors_without_a_ratio() -> None:
    found = parsed(
        tensor("l.0.q", 20, nonfinite=3),
        tensor("l.1.q", 20, squared_base=0.0),
        tensor("l.2.q", 20, nonfinite=256, squared_error=0.0, squared_base=0.0, worst=None),
        tensor("l.3.q", 20),
    )
    assert [row[1] for row in found.tables[0]] == ["q", "non-finite", "-inf", "non-finite", "20.0"]
    assert sum(keys.get("class") == "broken" for _, keys in found.tags) == 3
    assert "non-finite elements: 3" in found.titles[0]
    assert any("no error includes them: 259" in word for word in found.words)


def test_a_map_of_nothing_but_gaps_becomes_a_list() -> None:
    tensors = [tensor(f"l.{number}.column{number}", 20 + number / 100) for number in range(600)]
    text = page(compared(*tensors))
    assert [len(table) for table in Page(text).tables] == [500, 51]
    assert "and 100 more with smaller errors" in text


# Around it


def test_shows_totals() -> None:
    one = compared(tensor("l.0.q", 20), tensor("norm"), mine=["<mine>"], yours=["yours"] * 101)
    words = Page(page(one)).words

    assert words.count("packed:latest compared with base:latest") == 2
    for key, value in {
        "Tensors": "2",
        "Tensors that differ": "1",
        "Relative error, tensors that differ": "0.1",
        "SNR in dB, tensors that differ": "20.0",
        "Largest error": "0.25",
        "Bits per weight": "10.5",
        "Bits per weight of the base": "16",
    }.items():
        assert words[words.index(key) + 1] == value
    assert words[words.index("Only in packed:latest") + 2] == "<mine>"
    assert words.count("yours") == 100
    assert "and 1 more" in words


def test_lists_the_worst_tensors() -> None:
    tensors = [tensor(f"l.{number}.q", 20 + number / 100) for number in range(60)]
    *_, worst = parsed(*reversed(tensors), tensor("norm")).tables
    assert len(worst) == 51
    assert worst[1] == [
        *("l.0.q", "int4 g32", "BF16", "[4, 64]", "5", "0.1", "20.0", "0.25"),
        "0.5 at row 3, column 32",
    ]
    assert [row[0] for row in worst[1:]] == [f"l.{number}.q" for number in range(50)]


def test_texts_of_numbers() -> None:
    assert [number(value) for value in (None, math.inf, 0.0, 4.5, 16.0, 0.012345)] == [
        *("-", "inf", "0", "4.5", "16", "0.0123")
    ]
    assert [decibels(value) for value in (None, -math.inf, 20.04)] == ["-", "-inf", "20.0"]
    assert [type_of("int4", 32), type_of("BF16", 0)] == ["int4 g32", "BF16"]
    assert group_of(None) == "-"
