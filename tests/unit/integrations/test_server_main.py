"""Options, errors and exit codes shared by the serving commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import blobstore
from blobstore.errors import ModelNotFound
from blobstore.integrations.server_main import ServerOptions, run_server
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder


def serve(served: list[ServerOptions], *arguments: str) -> int:
    return run_server("some.module", "a server", "some serve", served.append, arguments)


def test_passes_on_model_store_and_the_server_s_own_options(tmp_path: Path) -> None:
    served: list[ServerOptions] = []
    options = ("--store", str(tmp_path), "--verify", "digest", "--read", "pread")
    assert serve(served, "m:1", *options, "--port", "80") == 0
    (one,) = served
    assert one.name == "m:1"
    assert one.store.root == tmp_path
    assert one.opening == {"verify": "digest", "read": "pread"}
    assert one.rest == ["--port", "80"]


def test_has_the_defaults_of_the_library() -> None:
    served: list[ServerOptions] = []
    assert serve(served, "m") == 0
    assert served[0].opening == {"read": "auto"}


def test_accepts_no_abbreviated_options() -> None:
    served: list[ServerOptions] = []
    assert serve(served, "m", "--ver", "digest") == 0
    assert served[0].rest == ["--ver", "digest"]


def test_rejects_an_empty_store(capsys: pytest.CaptureFixture[str]) -> None:
    served: list[ServerOptions] = []
    assert serve(served, "m", "--store", "") == 2
    assert capsys.readouterr().err == "blobstore: error: --store must not be empty\n"
    assert served == []


def test_an_error_is_one_line_and_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: ServerOptions) -> None:
        raise ModelNotFound("no model\x1b[31m")

    assert run_server("some.module", "a server", "some serve", fail, ["m"]) == 3
    assert capsys.readouterr().err == "blobstore: error: no model\\x1b[31m\n"


def test_ctrl_c_ends_with_the_status_of_the_signal() -> None:
    def interrupt(_: ServerOptions) -> None:
        raise KeyboardInterrupt

    assert run_server("some.module", "a server", "some serve", interrupt, ["m"]) == 130


@pytest.mark.parametrize("wrong", [[], ["m", "--verify", "much"], ["m", "--read", "ahead"]])
def test_shows_its_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve([], *wrong)
    assert capsys.readouterr().err.startswith("usage: python -m some.module NAME [--store DIR]")


@pytest.mark.parametrize("library", ["mlx_lm", "vllm"])
def test_a_server_whose_library_is_missing_says_in_one_line_what_to_install(
    library: str, tmp_path: Path
) -> None:
    (tmp_path / library).mkdir()
    (tmp_path / library / "__init__.py").write_text(
        f"raise ModuleNotFoundError('No module', name={library!r})"
    )
    model = write_folder(tmp_path / "model", dense_tensors())
    blobstore.create(model, "m", store=LocalStore(tmp_path / "store"))
    command = [sys.executable, "-m", f"blobstore.integrations.{library}.server", "m"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, "--store", str(tmp_path / "store")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch(
        rf"(model m:latest: verify=.+\n)?blobstore: error: {library} is not installed for this Python; run: pip install .+\n",
        done.stderr,
    )
