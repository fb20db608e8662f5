"""The house rules that no linter checks: floors, names, documents and what an import may cost."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import blobstore

ROOT = Path(__file__).parents[1]
PACKAGES = ("blobstore", "manifests", "cli")
LINKS = {"blobstore/manifests": "../manifests", "blobstore/cli": "../cli"}
# What an import may not cost: frameworks, terminals, networks, event loops.
HEAVY = {
    "asyncio",
    "email",
    "http",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "ml_dtypes",
    "mlx",
    "multiprocessing",
    "numpy",
    "requests",
    "rich",
    "safetensors",
    "socket",
    "ssl",
    "torch",
    "transformers",
    "urllib",
    "zstandard",
}
# A module of more lines than this needs a reason here.
LONG_LINES = 600
LONG: dict[str, str] = {}
# A module of fewer lines than this needs two importers, or a reason here.
SHORT_LINES = 60
SHORT: dict[str, str] = {
    "blobstore/folders/reflink.py": "a system call that not every platform has",
    "blobstore/gguf/config.py": "a subject of its own: what a header says of a model",
    "blobstore/integrations/mlx_lm/server.py": "a program of its own, started with python -m",
    "blobstore/models/rank_share.py": "a subject of its own: what each rank of several reads",
}
# The inside of a store: others use the methods of LocalStore.
STORE_ATTRIBUTES = {"_layout", "_hot", "_cold", "_pinned", "_locks", "_bases"}
STORE_CLASSES = {"Layout", "HotShelf", "ColdShelf", "ColdIndex", "Locks"}
# Where modules are imported by names that no linter follows, and why the import runs downwards all the same.
DYNAMIC_IMPORTS = {
    "blobstore/__init__.py": "the facade, which is above everything",
    "blobstore/core/argument_types.py": "what a module of the facade imports for type checkers",
    "blobstore/core/pictures.py": "what the facade registered",
    "blobstore/integrations/mlx_lm/__init__.py": "a module of its own package",
    "blobstore/safetensors/__init__.py": "modules of its own package",
    "blobstore/safetensors/handle.py": "modules of its own package",
    "blobstore/safetensors/writer.py": "modules of its own package",
    "cli/main.py": "the commands, which are below the program",
}
# What lies at the top: the packages, their tests and documents, and what forges and tools look for there.
TOP_LEVEL = {
    *("blobstore", "manifests", "cli", "tests", "docs", "pyproject.toml", "README.md"),
    *(".ci", ".devcontainer", ".github", ".gitignore", ".pre-commit-config.yaml"),
    *("CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("LICENSE", "LICENSE.ggml", "changelog.d", "mkdocs.yml", "noxfile.py"),
}
# A file outside of tests and documents that is larger than this was not written by hand.
LARGE_BYTES = 200_000
# What creates files, and why the paths of these cannot be inside a store: all others check that.
CREATORS = {"open_to_append", "replacing", "write_file", "write_bytes", "write_text", "O_CREAT"}
WRITES_ELSEWHERE = {
    "blobstore/integrations/small_files.py": "a new temporary folder",
    "blobstore/integrations/torch_checkpoint/export.py": "a new temporary folder",
    "blobstore/objects/conditional_writes.py": "the lock of a store in a folder",
    "blobstore/operations/create/ollama.py": "a new temporary folder",
    "blobstore/operations/follow/push_version.py": "a new temporary folder",
    "blobstore/operations/transfer/import_files.py": "a new temporary folder",
    "blobstore/remotes/transfer_cache.py": "a folder of the store for notes",
    "blobstore/registry/credentials.py": "the configuration of Docker or Podman",
    "blobstore/safetensors/numpy.py": "serialization writes the file",
    "blobstore/safetensors/torch.py": "serialization writes the file",
    "blobstore/serve/arriving_file.py": "a folder of the store for files that are being fetched",
    "blobstore/serve/given_names.py": "a folder of the store for notes",
    "blobstore/serve/pulled.py": "a folder of the store for notes",
    "blobstore/sources/hub_files.py": "the cache of the Hub's client, or a folder of the store for downloads",
    "blobstore/sources/hub_listing.py": "the cache of the Hub's client",
}
needs_links = pytest.mark.skipif(
    (ROOT / "PKG-INFO").exists(), reason="a source distribution holds the folders and no links"
)


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def module_paths() -> list[str]:
    """Return the packages' modules, relative to the root; the links are not followed."""
    found = []
    for package in PACKAGES:
        for folder, folders, files in os.walk(ROOT / package):
            place = Path(folder).relative_to(ROOT)
            # In a source distribution, these folders stand twice.
            skipped = {"__pycache__"} | {
                Path(link).name for link in LINKS if place.name == "blobstore"
            }
            folders[:] = [name for name in folders if name not in skipped]
            found += [(place / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def text_files() -> list[Path]:
    """Return the files that people write: code, documents and settings."""
    # In a git worktree, .git is a file that names the repository.
    ignored = {".coverage", ".git"}
    found = [path for path in ROOT.iterdir() if path.is_file() and path.name not in ignored]
    for top in (*PACKAGES, "docs", ".ci", "tests", "changelog.d"):
        found += [path for path in (ROOT / top).rglob("*") if path.is_file()]
    written = {".py", ".md", ".toml", ".txt", ".yaml", ".in", ""}
    data = ROOT / "tests" / "data"
    return [
        path
        for path in found
        if path.suffix in written and data not in path.parents and path.parent.name != "__pycache__"
    ]


MODULES = module_paths()


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), path)


@cache
def nodes(path: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a module. To find them takes longer than what most rules do with them."""
    return tuple(ast.walk(tree(path)))


def names_in(part: ast.AST) -> list[str]:
    """Return the names that code uses, and the attributes."""
    return [
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(part)
        if isinstance(node, (ast.Name, ast.Attribute))
    ]


def modules_after(code: str) -> set[str]:
    """Return the modules that a fresh interpreter holds after ``code``, less what it began with."""
    listing = f"import sys; before = set(sys.modules); {code}; print(*(set(sys.modules) - before), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", listing],
        capture_output=True,
        check=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        text=True,
    )
    return set(done.stdout.split())


@needs_links
def test_imports_keep_to_their_floors() -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"

    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        capture_output=True,
        check=False,
        cwd=ROOT,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("module", ["blobstore", "blobstore.cli.main"])
def test_import_loads_nothing_heavy(module: str) -> None:
    loaded = modules_after(f"import {module}")

    assert module in loaded
    assert not {name.partition(".")[0] for name in loaded} & HEAVY


@pytest.mark.parametrize(
    "module",
    ["compare.diff", "describe.list", "describe.show", "export.link", "maintenance.verify"],
)
def test_operations_that_compute_no_values_start_without_libraries_that_do(module: str) -> None:
    loaded = modules_after(f"import blobstore.operations.{module}")

    assert not {name.partition(".")[0] for name in loaded} & (HEAVY - {"urllib"})


def test_import_of_the_package_loads_the_standard_library_alone() -> None:
    loaded = {name.partition(".")[0] for name in modules_after("import blobstore")}

    assert loaded - sys.stdlib_module_names == {"blobstore"}


def test_no_module_outside_store_uses_the_inside_of_a_store() -> None:
    outside = [path for path in MODULES if "/store/" not in path]
    used = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in outside
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr in STORE_ATTRIBUTES
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]
    imported = {
        (path, alias.name)
        for path in outside
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("blobstore.store")
        for alias in node.names
        if alias.name in STORE_CLASSES
    }

    assert used == [], "use a method of LocalStore"
    assert imported == set()


def test_every_module_that_creates_files_checks_that_they_are_outside_of_stores() -> None:
    creating = set()
    checking = set()
    for path in MODULES:
        names = set(names_in(tree(path)))
        modes = {
            node.args[0].value
            for node in nodes(path)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "open"
            and node.args
            and isinstance(node.args[0], ast.Constant)
        }
        if names & CREATORS or any(set("wxa") & set(str(mode)) for mode in modes):
            creating.add(path)
        if names & {"check_target", "check_new_file"}:
            checking.add(path)
    inside = {path for path in creating if path.startswith(("blobstore/store/", "blobstore/core/"))}

    assert creating - inside - checking == set(WRITES_ELSEWHERE), (
        "call check_target before a file is created, or say in WRITES_ELSEWHERE why it is outside of stores"
    )


def tracked_files() -> list[Path]:
    """Return the files that git has; without git, as in a source distribution, skip the test."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout")
    return [Path(name) for name in done.stdout.split("\0") if name]


def test_nothing_else_lies_at_the_top() -> None:
    assert {path.parts[0] for path in tracked_files()} - TOP_LEVEL == set(), (
        "put it where it belongs: every file of the top is in the source distribution too"
    )


def test_no_binary_and_no_large_file_lies_among_the_sources() -> None:
    found = []
    for path in tracked_files():
        file = ROOT / path
        if path.parts[0] in {"tests", "docs"} or not file.is_file():
            continue
        data = file.read_bytes()
        if len(data) > LARGE_BYTES or b"\0" in data:
            found.append(path.as_posix())

    assert found == []


def length(path: str) -> int:
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def dotted(path: str) -> str:
    """Return the name by which a module is imported."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith("blobstore") else f"blobstore.{name}"


@cache
def importers() -> dict[str, set[str]]:
    """Return by which modules each module is imported."""
    found: dict[str, set[str]] = {}
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for name in (node.module, *(f"{node.module}.{item.name}" for item in node.names)):
                    found.setdefault(name, set()).add(path)
    return found


def test_long_modules_have_a_reason() -> None:
    assert {path for path in MODULES if length(path) > LONG_LINES} == set(LONG), (
        f"split what is over {LONG_LINES} lines by subject"
    )


def test_short_modules_are_shared_or_have_a_reason() -> None:
    short = {
        path
        for path in MODULES
        if length(path) < SHORT_LINES
        and Path(path).name not in ("__init__.py", "__main__.py")
        and not path.startswith("cli/")  # one file per command, however short
        and len(importers().get(dotted(path), ())) < 2
    }

    assert short == set(SHORT), (
        f"a module of under {SHORT_LINES} lines belongs into the one that imports it, or has a reason in SHORT"
    )


def test_the_page_about_the_architecture_shows_the_contract_of_the_packages() -> None:
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    contract = project()["tool"]["importlinter"]["contracts"][0]["layers"]
    layers = [set(layer.split(" | ")) for layer in contract if layer != "__main__"]
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)
    listed = [
        {name for level, name in rows if int(level) == number}
        for number in range(len(layers), 0, -1)
    ]
    arrows = re.search(r"flowchart TD\n(.*?)```", page, re.DOTALL)

    assert listed == layers, (
        "the table of packages there differs from the contract in pyproject.toml"
    )
    assert arrows is not None
    drawn = [
        tuple(set(end.split(" & ")) for end in pair)
        for line in arrows[1].splitlines()
        for pair in itertools.pairwise(line.strip().split(" --> "))
    ]
    assert drawn == list(itertools.pairwise(layers))


def test_every_folder_of_modules_is_a_package() -> None:
    """``.ci/release/build.py`` compares the files of the wheel with the tree."""
    assert {Path(path).parent for path in MODULES} == {
        Path(path).parent for path in MODULES if Path(path).name == "__init__.py"
    }


def test_no_package_hides_a_public_name() -> None:
    folders = {
        Path(path).parent.name for path in MODULES if Path(path).parent.parent.name == "blobstore"
    }

    assert folders.isdisjoint(blobstore.__all__)


def test_test_folders_mirror_the_packages() -> None:
    packages = {Path(path.removeprefix("blobstore/")).parent for path in MODULES}
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}

    assert folders == packages, "each package has a folder of tests, and each folder a package"


def test_every_operation_has_its_tests() -> None:
    unit = ROOT / "tests" / "unit"
    homes = {home for home, _ in blobstore._HOMES.values() if ".operations." in home}
    files = {home.removeprefix("blobstore.").replace(".", "/") for home in homes}

    missing = [
        file
        for file in files
        if not (unit / Path(file).parent / f"test_{Path(file).name}.py").is_file()
    ]

    assert missing == [], "tests/unit has no test_*.py for these public operations"


@pytest.mark.parametrize("name", blobstore.__all__)
def test_public_name_is_there(name: str) -> None:
    assert getattr(blobstore, name) is not None
    assert name in dir(blobstore)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = blobstore.nothing  # type: ignore[attr-defined]


@needs_links
@pytest.mark.parametrize("link", LINKS)
def test_links_are_relative(link: str) -> None:
    assert (ROOT / link).is_symlink()
    assert (ROOT / link).readlink() == Path(LINKS[link])


def test_modules_are_imported_by_name_in_few_places_only() -> None:
    found = {
        path
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and any("import_module" in name for name in names_in(node.func))
    }

    assert found == set(DYNAMIC_IMPORTS), (
        "use an import statement, or say in DYNAMIC_IMPORTS why the import runs downwards"
    )


def test_one_module_asks_what_the_system_can_do() -> None:
    """``mypy --platform darwin`` finds the calls that macOS does not have."""
    modules = {"ctypes", "fcntl", "mmap", "os", "select", "signal", "socket", "sys", "time"}
    found = set()
    for path in MODULES:
        for node in nodes(path):
            match node:
                case ast.Attribute(ast.Name("sys"), "platform") | ast.Attribute(
                    ast.Name("os"), "name"
                ):
                    found.add(path)
                case ast.Import(names) if "platform" in {item.name for item in names}:
                    found.add(path)
                case ast.Call(ast.Name("hasattr" | "getattr"), [ast.Name(name), *_]) if (
                    name in modules
                ):
                    found.add(path)
                case ast.Constant(str(text)) if text.startswith("/proc/"):
                    found.add(path)

    assert found == {"blobstore/core/system.py"}, (
        "ask blobstore.core.system, which has these checks"
    )


def test_an_error_of_a_disk_is_not_read_as_absence() -> None:
    """These functions say no for any error, or do from Python 3.14 on."""
    looks = {"exists", "lexists", "isfile", "isdir", "islink", "is_file", "is_dir", "is_symlink"}
    found = {
        f"{path}: {ast.unparse(node.func)}"
        for path in MODULES
        if path.startswith(("blobstore/store/", "blobstore/serve/"))
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in looks
        and "_store.exists" not in ast.unparse(node.func)  # a store looks as is asked for here
    }
    assert found == {
        "blobstore/store/manifests.py: os.path.lexists",  # for an advice, and outside of the store
        "blobstore/store/manifests.py: path.is_symlink",  # to say why nothing is there
        "blobstore/store/outside_gguf.py: Path(reference).is_file",  # outside of the store
        "blobstore/store/scan.py: entry.is_dir",  # below: entries of a list of a folder
        "blobstore/store/scan.py: entry.is_symlink",  # what the folder said of it
        "blobstore/store/scan.py: os.path.islink",  # to say why nothing is there
    }, "use status_of, is_there or FileVersion.of of blobstore.core.files"


def test_a_home_folder_is_not_needed_to_expand_a_path() -> None:
    found = {
        path
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "expanduser"
    }
    # Those that do it themselves: a URL is no path, and variables of AWS are paths that nobody checks.
    assert found == {
        "blobstore/core/arguments.py",
        "blobstore/objects/aws.py",
        "blobstore/sources/open.py",
    }, "use local_path of blobstore.core.arguments"


def test_no_file_names_a_place_of_one_machine() -> None:
    place = re.compile(
        r"/work/|/root/|/home/\w|/Users/\w|/tmp/(?:venv|house)\b"
    )  # not in this file

    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in text_files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if place.search(line)
    ]

    assert found == []
