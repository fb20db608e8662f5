from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from blobstore.errors import InvalidReference, NameConflict, UsageError
from blobstore.manifests.reference import Reference, all_under, name_matches, similar_names
from blobstore.store.layout import Layout

LAYOUT = Layout(Path("/store"))
GRAMMAR = st.text(alphabet="aZ0_-.:/@ \\\0\n~é", max_size=12)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("m", ("registry.ollama.ai", "library", "m", "latest")),
        ("m:t", ("registry.ollama.ai", "library", "m", "t")),
        ("n/m", ("registry.ollama.ai", "n", "m", "latest")),
        ("n/m:8b-q4_K.M", ("registry.ollama.ai", "n", "m", "8b-q4_K.M")),
        ("h/n/m", ("h", "n", "m", "latest")),
        ("h:5/m", ("h:5", "library", "m", "latest")),
        ("n.s/m:t", ("n.s", "library", "m", "t")),
        ("localhost/m", ("localhost", "library", "m", "latest")),
        ("localhost:5000/n/m:t", ("localhost:5000", "n", "m", "t")),
        ("hf.co/Org/Some-Model.v1:Q4", ("hf.co", "Org", "Some-Model.v1", "Q4")),
        ("_/_:_", ("registry.ollama.ai", "_", "_", "_")),
        ("[".replace("[", "a..b"), ("registry.ollama.ai", "library", "a..b", "latest")),
    ],
)
def test_fills_in_what_is_left_out(text: str, parts: tuple[str, ...]) -> None:
    reference = Reference.parse(text)
    assert reference.parts == parts
    assert reference.full == f"{parts[0]}/{parts[1]}/{parts[2]}:{parts[3]}"


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", ":t", "m:", "m:t:u", "/", "/m", "n/", "n//m", "//m", "a/b/c/d", ".", ".."),
        *("../m", "n/..", "m:..", "m:.", "../../../m", "./m", "~/m", "-m", "m:-t", ".m", ".n/m"),
        *(
            "n:x/m",
            "n.s:x/m",
            "hf:n/m",
            "h/n:5/m",
            "m\n",
            "\nm",
            "m ",
            " m",
            "m\0",
            "m\\n",
            "m@sha256",
            "m#1",
            "m*",
        ),
        *("é", "m\u0660", "\uff4d", "http://h/n/m", "[::1]:80/n/m", ":5000/n/m"),
    ],
)
def test_rejects_invalid_names(text: str) -> None:
    with pytest.raises(InvalidReference, match="not a model name") as caught:
        Reference.parse(text)
    assert isinstance(caught.value, UsageError)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["/srv/models", "./m", "../m", "~/models"])
def test_says_that_a_path_is_not_a_name(text: str) -> None:
    with pytest.raises(InvalidReference, match="not a model name: '.*' is a path$"):
        Reference.parse(text)


@pytest.mark.parametrize(
    ("part", "limit"), [("host", 255), ("namespace", 80), ("model", 80), ("tag", 80)]
)
def test_every_part_has_its_longest_length(part: str, limit: int) -> None:
    parts = {"host": "h", "namespace": "n", "model": "m", "tag": "t"}
    longest = Reference(**parts | {part: "x" * limit})
    assert Reference.parse(longest.full) == longest
    with pytest.raises(InvalidReference, match=f"{part} '.*' must be 1 to {limit} letters"):
        Reference(**parts | {part: "x" * (limit + 1)})
    with pytest.raises(InvalidReference, match=f"{part} '' must be 1 to {limit}"):
        Reference(**parts | {part: ""})


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("m", "m:latest"),
        ("library/m", "m:latest"),
        ("registry.ollama.ai/library/m:t", "m:t"),
        ("n/m", "n/m:latest"),
        ("registry.ollama.ai/n/m", "n/m:latest"),
        ("h/library/m", "h/library/m:latest"),
        ("h.x/library/m", "h.x/m:latest"),
        ("127.0.0.1:18081/m", "127.0.0.1:18081/m:latest"),
        ("registry.ollama.ai/m", "m:latest"),
        ("registry.ollama.ai/localhost/m", "registry.ollama.ai/localhost/m:latest"),
        ("h/n/m", "h/n/m:latest"),
    ],
)
def test_is_shown_by_its_shortest_name(text: str, short: str) -> None:
    assert str(Reference.parse(text)) == short


def test_its_repr_is_short() -> None:
    reference = Reference.parse("team/llama:1b")
    assert repr(reference) == "Reference('team/llama:1b')"


def test_names_get_the_host_and_namespace_of_a_prefix() -> None:
    names = [*map(Reference.parse, ("m:t", "n/o", "h.x/n/p"))]
    assert list(map(str, all_under("lab", names))) == ["lab/m:t", "lab/o:latest", "lab/p:latest"]
    assert str(names[0].under("h:5/lab/")) == "h:5/lab/m:t"
    assert str(names[2].under("h:5")) == "h:5/p:latest"
    assert all_under(None, names) == names
    with pytest.raises(NameConflict, match="'a/m:latest' and 'b/m:latest' would both become 'c/m"):
        all_under("c", map(Reference.parse, ("a/m", "b/m")))
    for prefix in ("", "a/b/c", "lab:v1", "../x", "a b"):
        with pytest.raises(InvalidReference):
            names[0].under(prefix)


def test_keeps_the_case() -> None:
    assert str(Reference.parse("Org/Model:Q4_K")) == "Org/Model:Q4_K"
    assert Reference.parse("M") != Reference.parse("m")


def test_a_colon_in_the_host_is_no_tag() -> None:
    assert Reference.parse("h:1/n/m").host == "h:1"
    assert Reference.parse("h:1/n/m").tag == "latest"


def test_sorts_by_its_parts() -> None:
    names = ["b", "a:2", "n/a", "a:1", "h/a/a"]
    assert [str(item) for item in sorted(map(Reference.parse, names))] == [
        "h/a/a:latest",
        "a:1",
        "a:2",
        "b:latest",
        "n/a:latest",
    ]


def test_numbers_in_names_sort_by_their_values() -> None:
    names = [
        *("llama-7b:v2", "llama-7b:v10", "llama-13b:v1"),
        *("run:step-05", "run:step-5", "run:step-5.state", "run:step-10", "run:step-x"),
    ]
    found = sorted(map(Reference.parse, reversed(names)))
    assert [str(name) for name in found] == names


@pytest.mark.slow
@given(GRAMMAR | st.text(max_size=8))
@example("a/../b")
@example("..")
def test_an_accepted_name_is_a_path_inside_the_store(text: str) -> None:
    try:
        reference = Reference.parse(text)
    except InvalidReference:
        return
    path = LAYOUT.manifest(reference)
    assert path.is_relative_to(LAYOUT.manifests)
    relative = path.relative_to(LAYOUT.manifests)
    assert len(relative.parts) == 4
    assert all(part not in ("", ".", "..") and "/" not in part for part in relative.parts)
    assert not any(part.startswith((".", "-")) for part in relative.parts)
    assert LAYOUT.reference(path) == reference


@given(GRAMMAR | st.text(max_size=8))
def test_a_name_survives_being_shown(text: str) -> None:
    try:
        reference = Reference.parse(text)
    except InvalidReference:
        return
    assert Reference.parse(str(reference)) == reference
    assert Reference.parse(reference.full) == reference


PART = st.text(alphabet="ab0_-.:", min_size=1, max_size=3)


@pytest.mark.slow
@given(st.tuples(PART, PART, PART, PART), st.tuples(PART, PART, PART, PART))
def test_two_names_never_share_a_path(
    first: tuple[str, str, str, str], second: tuple[str, str, str, str]
) -> None:
    assume(first != second)
    try:
        one, other = Reference(*first), Reference(*second)
    except InvalidReference:
        return
    assert LAYOUT.manifest(one) != LAYOUT.manifest(other)
    assert str(one) != str(other)


def test_an_address_in_a_registry_is_no_name_of_a_model() -> None:
    with pytest.raises(
        InvalidReference, match=r"'oci://h/m' is an address.*'blobstore pull' first"
    ):
        Reference.parse("oci://h/m")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("qwen", "'team/qwen:1b' or 'team/qwen:7b'"),
        ("quen", "'team/qwen:1b' or 'team/qwen:7b'"),
        ("tem/qwen:7b", "'team/qwen:7b' or 'team/qwen:70b'"),
        ("llama", "'llama'"),
        ("mistral", ""),
    ],
)
def test_a_similar_name_may_have_a_namespace_and_a_tag_too(text: str, meant: str) -> None:
    names = map(Reference.parse, ("team/qwen:1b", "team/qwen:7b", "team/qwen:70b", "llama"))
    found = similar_names(Reference.parse(text), names)
    assert found == (f"did you mean {meant}?" if meant else "")


@pytest.mark.parametrize(
    ("name", "globs", "others"),
    [
        (
            "secret",
            [
                "*",
                "secret",
                "*:latest",
                "registry.ollama.ai/*",
                "registry.ollama.ai/library/secret",
            ],
            [
                "*llama*",
                "r*",
                "*.ai*",
                "*/*",
                "library/*",
                "*library*",
                "registry.ollama.ai/secret",
            ],
        ),
        (
            "team/llama:v1",
            ["*llama*", "team/*", "registry.ollama.ai/team/*"],
            ["*ollama*", "llama*"],
        ),
        ("hf.co/team/m", ["hf.co/*", "*team/m", "*/m:latest"], ["team/*", "registry.ollama.ai/*"]),
    ],
)
def test_a_glob_matches_no_part_of_a_name_that_is_left_out_unless_it_begins_with_the_host(
    name: str, globs: list[str], others: list[str]
) -> None:
    reference = Reference.parse(name)
    assert [one for one in globs + others if name_matches(reference, one)] == globs
