from __future__ import annotations

import tomllib

import pytest

from blobstore.core import toml
from blobstore.core.digest import Digest
from blobstore.errors import UsageError
from blobstore.manifests.lock_file import LockedModel, format_lock, parse_lock
from blobstore.manifests.reference import Reference

DIGEST = Digest.of(b"x")
HEAD = f'name = "a"\nmanifest = "{DIGEST}"\n'
MODELS = [
    LockedModel(
        reference=Reference.parse("b:v1"), manifest=DIGEST, remote='s3://x/"b"\\\x7f\U0001f600:v1'
    ),
    LockedModel(
        reference=Reference.parse("a"),
        manifest=DIGEST,
        repository="org/a",
        commit="c" * 40,
        options={"quantize": "int4", "exclude": ["*.é"]},
    ),
]


def test_a_lock_file_is_sorted_toml_and_is_read_back() -> None:
    text = format_lock(MODELS)
    assert [item["name"] for item in tomllib.loads(text)["models"]] == ["a:latest", "b:v1"]
    assert parse_lock(text, "file") == sorted(MODELS, key=lambda model: model.reference)
    assert format_lock(reversed(MODELS)) == text
    assert parse_lock(format_lock([]), "file") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the version is 'None', expected 1"),
        ("version = 2", "the version is '2'"),
        ("version = 1\nmodels = 3", "models must be tables"),
        ("version = 1\nmodels = [3]", "model 1: expected a table of texts"),
        ("version = 1\n[[models]]\nname = 3", "expected a table of texts"),
        ("version = 1\n[[models]]\nname = 'a'", "manifest is missing"),
        (f"version = 1\n[[models]]\n{HEAD}more = 'x'", "unknown key 'more'"),
        (f"version = 1\n[[models]]\n{HEAD}options = 'x'", "options: "),
        (f"version = 1\n[[models]]\n{HEAD}options = '[]'", "options: expected an object"),
        ("version = 1" + "0" * 5000, "not a lock file: "),
        ("a." * 1000 + "b = 1", "not a lock file: a key has more than 16 parts"),
        (
            f"version = 1\n[[models]]\n{HEAD}[[models]]\n{HEAD}",
            "model 2: 'a:latest' is listed twice",
        ),
        ("version = 1\n[[models]]\n" + HEAD.replace('"a"', '"../a"'), "not a model name"),
        ("version = 1\n[[models]]\nname = 'a'\nmanifest = 'sha256:0'", "model 1: "),
        ("version = ", "not a lock file"),
        ("version = 1\nx = " + "[" * 5000, "not a lock file"),
    ],
)
def test_another_text_than_a_lock_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_lock(text, "file")
    assert str(caught.value).startswith("file: ")
    assert message in str(caught.value)


def test_an_address_that_is_not_utf_8_is_refused() -> None:
    model = LockedModel(reference=Reference.parse("a"), manifest=DIGEST, remote="file:///\udcff/a")
    with pytest.raises(UsageError, match="'a:latest'.*not UTF-8"):
        format_lock([model])


def test_what_is_written_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(format_lock(MODELS))
    monkeypatch.setattr(toml, "MAX_SIZE", size)
    assert len(parse_lock(format_lock(MODELS), "file")) == len(MODELS)
    monkeypatch.setattr(toml, "MAX_SIZE", size - 1)
    with pytest.raises(UsageError, match="lock fewer models"):
        format_lock(MODELS)
