"""One rule for addresses: what names a thing elsewhere is never a folder here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from tests.unit.cli.running import run, run_json

PUSH = "'blobstore push' sends models there"
PULL = "'blobstore pull' fetches models from there"
OTHERS = "push, pull, list, du and verify take others by their address"


@pytest.fixture
def here(stored: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("cp", "dense", "--to", "s3://bucket/team"), PUSH),
        (("export", "dense", "s3://bucket/x"), PUSH),
        (("link", "dense", "oci://host/x"), PUSH),
        (("pack", "dense", "s3://bucket/x.bsar"), PUSH),
        (("page", "s3://bucket/p.html"), PUSH),
        (("convert", "x.pt", "s3://bucket/x.safetensors"), PUSH),
        (("unpack", "s3://bucket/x.bsar"), PULL),
        (("list", "--store", "s3://bucket/team"), OTHERS),
        (("--store", "gs://bucket/team", "list"), OTHERS),
        (("list", "--store", "file:///team"), "write the path without file://"),
    ],
)
def test_an_address_in_place_of_a_path_is_refused_and_makes_nothing(
    words: tuple[str, ...], advice: str, here: Path
) -> None:
    before = sorted(here.iterdir())
    result = run(*words, exit_code=2)
    assert result.stderr.endswith(f"{advice}\n")
    assert sorted(here.iterdir()) == before


def test_the_variable_of_the_store_is_no_address_either(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOBSTORE_HOME", "s3://bucket/team")
    run("create", here / "dense", "again", exit_code=2)
    assert not (here / "s3:").exists()


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("oci://host.example/x", PULL),
        ("hf:org/x", "for the Hub's repository, say hf://org/x"),
        (
            "https://host.example/x",
            "'blobstore pull https://host.example/x' fetches a model of a server; for a file, give the URL",
        ),
        (
            "docker://host.example/x",
            "'blobstore pull host.example/x' fetches a model of a registry",
        ),
    ],
)
def test_a_source_that_is_elsewhere_is_not_found_with_the_command_that_fetches_it(
    source: str, advice: str, here: Path
) -> None:
    errors = run("create", source, "new", exit_code=3).stderr
    assert advice in errors
    assert ("is an address, not the path of" in errors) == ("://" in source)


@pytest.mark.parametrize(
    ("remote", "advice"),
    [
        (
            "http://host.example/r",
            "a server that only reads; for a registry, write 'oci://host.example/r:latest' --plain",
        ),
        (
            "https://host.example/r",
            "a server that only reads; for a registry, write 'oci://host.example/r:latest' --no-plain",
        ),
        ("docker://host.example/r", "write 'oci://host.example/r'"),
        ("ftp://host.example/r", "expected [oci://]host"),
    ],
)
def test_schemes_of_other_tools_are_explained(remote: str, advice: str, here: Path) -> None:
    assert advice in run("push", "dense", remote, exit_code=2).stderr


def test_whole_remote_stores_and_their_models_are_shown(here: Path) -> None:
    place = f"file://{here}/bucket/team"
    run("push", "dense", place)
    run("push", "dense", f"{place}/other:v1")
    listed = run_json("list", place)["models"]
    assert [model["name"] for model in listed] == [f"{place}/dense:latest", f"{place}/other:v1"]
    assert listed[0]["bytes"] == listed[0]["shared_bytes"] > 0
    assert listed[0]["digest"].startswith("sha256:")
    assert "together: 2 models" in run("du", place).stdout
    assert "in the store  " in run("info", f"{place}/other:v1").stdout
    assert run("cat", f"{place}/other:v1", "merges.txt").stdout == "a b\n"
    assert "to file" in run("tag", f"{place}/other:v1", "v2").stdout
    assert run_json("rm", f"{place}/other:v1")["removed"] == [f"{place}/other:v1"]
    assert run("-q", "list", place).stdout.split() == [f"{place}/dense:latest", f"{place}/other:v2"]
    run("pull", f"{place}/other:v2")


@pytest.mark.parametrize("command", ["list", "du", "verify", "info", "rm"])
def test_a_mistyped_store_is_not_found(command: str, here: Path) -> None:
    run("push", "dense", f"file://{here}/bucket/team")
    run(command, f"file://{here}/bucket/taem/x", exit_code=3)
    assert [path.name for path in (here / "bucket").iterdir()] == ["team"]


def test_another_folder_is_not_taken_for_an_empty_store(here: Path) -> None:
    (here / "models").mkdir()
    assert run("list", "--store", here / "models").stdout == ""
    (here / "models" / "dense").symlink_to(here / "dense")
    for command in ("list", "du"):
        result = run(command, "--store", here / "models", exit_code=3)
        assert "'blobstore create --all PATH' imports them" in result.stderr
        run(command, "--store", here / "typo", exit_code=3)


def test_the_address_of_a_registry_that_is_taken_for_a_name_is_explained(here: Path) -> None:
    result = run("list", "localhost:5000/team/repo", exit_code=3)
    assert "write 'oci://localhost:5000/team/repo'" in result.stderr


@pytest.mark.parametrize("command", ["info", "verify", "freeze", "rm", "link"])
def test_a_path_in_place_of_a_name_gets_the_command_that_imports_it(
    command: str, here: Path
) -> None:
    words = ["x"] if command == "link" else []
    assert "'blobstore create PATH NAME'" in run(command, "./dense", *words, exit_code=2).stderr


@pytest.mark.parametrize("words", [("gc",), ("page", "p.html"), ("lock",), ("du",), ("verify",)])
def test_a_mistyped_store_is_an_error_with_a_way_out(words: tuple[str, ...], here: Path) -> None:
    result = run(*words, "--store", "nowhere", exit_code=3)
    assert "there is no store at" in result.stderr
    assert "--store or BLOBSTORE_HOME names another" in result.stderr
    assert not (here / "p.html").exists()
    assert not (here / "models.lock").exists()


def test_a_model_of_a_mistyped_store_is_an_error_with_a_way_out(here: Path) -> None:
    error = run("info", "dense", "--store", "nowhere", exit_code=3).stderr
    assert "there is no store there; 'blobstore create' makes a store" in error


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems have names in UTF-8 alone")
def test_an_address_may_have_other_bytes_than_utf_8(here: Path) -> None:
    place = f"file://{here}/\udcff"
    run("push", "dense", place)
    run("pull", f"{place}/dense", "copy")
    run("follow", "other", f"{place}/dense:latest", "--once")
    run("show", f"{place}/dense")
    assert "'copy:latest'" in run("lock", "copy").stderr  # no file can say where it is


@pytest.mark.parametrize(
    "words", [("list",), ("info",), ("pull",), ("push", "one"), ("tag", "--force")]
)
@pytest.mark.parametrize("address", ["S3://bucket/x", "s3:/bucket/x", "OCI://host/x"])
def test_a_misspelled_scheme_is_named_with_the_right_one(
    words: tuple[str, ...], address: str, here: Path
) -> None:
    rest = address.partition(":")[2].strip("/")
    more = ("v1",) if words[0] == "tag" else ()
    result = run(*words, address, *more, exit_code=2)
    assert f"; write {address.partition(':')[0].lower()}://{rest}\n" in result.stderr
    assert not (here / "s3:").exists()


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (("serve", "--peers", "{}"), 2),
        (("serve", "--upstream", "{}"), 2),
        (("create", "{}", "q"), 3),
        (("cp", "dense", "--to", "{}"), 2),
        (("gc", "--remote", "{}"), 2),
        (("sync", "{}"), 2),
        (("inspect", "{}"), 2),
        (("unpack", "{}"), 2),
        (("export", "{}", "x"), 2),
        (("compare", "dense", "{}"), 2),
        (("repair", "dense", "--from", "{}"), 2),
        (("freeze", "{}"), 2),
        (("history", "{}"), 2),
        (("tag", "dense", "{}"), 2),
    ],
)
def test_an_address_is_refused_without_its_password(
    words: tuple[str, ...], exit_code: int, here: Path
) -> None:
    address = "http://alice:s3cr3t@host:80/x?token=s3cr3t"
    result = run(*(word.format(address) for word in words), exit_code=exit_code)
    assert "s3cr3t" not in result.output
    assert "host:80" in result.stderr
