"""The extras: what works without them, and what commands say that need one."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from blobstore.core.libraries import install_command
from blobstore.store.local import LocalStore
from tests.unit.cli.running import LAUNCHER, environment

ROOT = Path(__file__).parents[3]
OPTIONAL = (
    *(
        "aiohttp",
        "blake3",
        "botocore",
        "cryptography",
        "distributed",
        "httpx2",
        "huggingface_hub",
        "mlx",
    ),
    *("obstore", "ray", "torch", "xxhash"),
)
# For each extra, a library that it brings, and a command or a program that needs it.
NEEDING = {
    "aws": ("botocore", ["list", "s3://bucket"]),
    "dask": ("distributed", ["ingest", "LIST", "--executor", "dask://127.0.0.1:1"]),
    "follow": ("xxhash", ["push", "dense", "VERSIONS", "--as=slime", "--base=dense"]),
    "hub": ("huggingface_hub", ["create", "hf://org/name", "other"]),
    "mlx": ("mlx", "import blobstore\nblobstore.open('dense', framework='mlx')"),
    "objects": ("obstore", ["list", "file:///nowhere/store"]),
    "page": ("aiohttp", ["page", "--serve"]),
    "ray": ("ray", ["ingest", "LIST", "--executor", "ray://127.0.0.1:1"]),
    "registry": ("httpx2", ["pull", "localhost:1/team/model"]),
    "serve": ("aiohttp", ["serve"]),
    "sign": ("cryptography", ["sign", "dense", "--key", "KEY"]),
    "torch": ("torch", "import blobstore\nblobstore.open('dense', framework='torch')"),
}


def without(libraries: tuple[str, ...], code: str, *arguments: object, **variables: str) -> str:
    """Run a program as if libraries were not installed; return its output and errors."""
    block = f"import sys\nsys.modules |= dict.fromkeys({libraries})\n"
    done = subprocess.run(
        [sys.executable, "-c", block + code, *map(str, arguments)],
        capture_output=True,
        check=False,
        env=environment(**variables),
        text=True,
    )
    return done.stdout + done.stderr


def test_every_extra_is_tried_here_and_is_part_of_all_unless_it_is_a_framework_or_a_cluster() -> (
    None
):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]

    assert extras.keys() - {"all"} == NEEDING.keys()
    (everything,) = extras["all"]
    inside = everything.removeprefix("tensor-blobstore[").removesuffix("]").split(",")
    assert extras.keys() - {"all", *inside} == {"dask", "mlx", "objects", "page", "ray", "torch"}
    assert "tensor-blobstore[objects]" in extras["aws"]


@pytest.mark.parametrize("extra", NEEDING)
def test_a_command_without_an_extra_says_in_one_line_how_to_install_it(
    extra: str, stored: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "list").write_text("hf://org/name other\n")
    (tmp_path / "key").write_bytes(b"-----BEGIN PRIVATE KEY-----\n")
    (tmp_path / "config").write_text("[profile team]\nsso_session = team\nregion = eu-west-1\n")
    aws = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_PROFILE": "team"}
    library, needing = NEEDING[extra]
    blocked = tuple(name for name in OPTIONAL if extra != "aws" or name != "obstore")
    if isinstance(needing, str):
        shown = without(blocked, needing)
    else:
        paths = {"LIST": tmp_path / "list", "KEY": tmp_path / "key"}
        words = [paths.get(word, word) for word in needing]
        shown = without(blocked, LAUNCHER, *words, **aws)
        assert shown.startswith("blobstore: error: ")
        assert shown.count("\n") == 1

    what = f"{library} is not installed for this Python"
    if extra == "aws":
        what = "the profile 'team' has sso_session, which needs the package botocore"
    assert shown.endswith(f": {what}; run: {install_command(library)}\n")


def test_the_store_needs_no_optional_library(stored: LocalStore, tmp_path: Path) -> None:
    code = """
import blobstore
folder = sys.argv[1]
with blobstore.open("dense") as model:
    assert sum(array.nbytes for array in model.values()) > 0
blobstore.export("dense", f"{folder}/exported")
blobstore.create(f"{folder}/exported", "again", quantize=blobstore.QuantizeOptions("int4"))
blobstore.freeze(["dense"])
blobstore.pack(["dense"], f"{folder}/archive")
blobstore.verify()
blobstore.page(f"{folder}/page.html")
print("done")
"""
    shown = without(OPTIONAL, code, tmp_path)
    assert shown == "done\n"


def test_a_push_to_object_storage_needs_no_client_of_registries(
    stored: LocalStore, tmp_path: Path
) -> None:
    shown = without(
        ("httpx2", "huggingface_hub"),
        LAUNCHER,
        *("push", "dense", f"file://{tmp_path}/remote", "--quiet"),
    )
    assert shown.startswith("pushed dense:latest")
