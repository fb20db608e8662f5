"""The documentation: its examples run as they stand, in order, and use the public interface alone."""

from __future__ import annotations

import ast
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

import blobstore
from blobstore.cli.main import GROUPS, program
from tests.faults.processes import workspace
from tests.support.commands import quick_commands
from tests.support.objects import ObjectServer
from tests.support.ports import free_port
from tests.support.registry import PROGRAM, running_registry
from tests.support.transcripts import PYTHON_BLOCK, ROOT, examples, is_as_expected, outputs, pages

PUBLIC_MODULES = ("blobstore.errors", "blobstore.safetensors", "blobstore.integrations")
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LONGEST_LINE = 100


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_examples() -> dict[str, str]:
    """Return what users see of Python: the blocks of the documents, and the example programs."""
    found = {
        f"{name_of(path)}:{number}": block
        for path in DOCUMENTS
        for number, block in enumerate(PYTHON_BLOCK.findall(path.read_text(encoding="utf-8")), 1)
    }
    programs = (ROOT / "docs" / "examples").glob("*.py")
    return found | {name_of(path): path.read_text(encoding="utf-8") for path in programs}


def is_public(module: str, name: str) -> bool:
    if module == "blobstore":
        return name in blobstore.__all__ or f"blobstore.{name}" in PUBLIC_MODULES
    return module.startswith(PUBLIC_MODULES)


needs_signing = pytest.mark.skipif(
    find_spec("cryptography") is None, reason="it is in the test group, and in the extra [sign]"
)
COMMANDS = "docs/reference/commands"
WITH_EXAMPLES = {
    COMMANDS: 30,
    "docs/guides/signatures.md": 5,
    "docs/guides/save-space.md": 9,
    "docs/guides/repair.md": 6,
    "docs/guides/follow.md": 12,
    "docs/guides/registries.md": 10,
    "docs/guides/object-storage.md": 15,
    "docs/guides/serve.md": 20,
    "docs/guides/backup.md": 11,
    "docs/guides/restore.md": 20,
    "docs/guides/upgrade.md": 5,
    "docs/guides/move.md": 10,
    "docs/guides/teams.md": 9,
}
REGISTRY = "localhost:5000"
OBJECTS = "http://localhost:8333"
PORT = "8080"
"""The servers of the documents. Those of the tests have other ports."""


def test_the_package_is_installed_from_the_clone_as_long_as_no_index_has_it() -> None:
    assert "not on PyPI yet" in (ROOT / "docs/getting-started/install.md").read_text()
    notebooks = (ROOT / "docs").rglob("*.ipynb")
    texts = [*map(Path.read_text, (*DOCUMENTS, *notebooks)), *python_examples().values()]
    assert [text for text in texts if re.search(r"pip\s+install[^`\n]*tensor-", text)] == []
    assert sum("pip install -e '.[" in text for text in texts) > 9


@needs_signing
def test_commands_print_what_the_document_of_signatures_says() -> None:
    check_examples("docs/guides/signatures.md", None)


@pytest.mark.parametrize(
    "page", ["save-space", "repair", "follow", "backup", "upgrade", "move", "teams"]
)
def test_commands_print_what_a_guide_says(page: str) -> None:
    check_examples(f"docs/guides/{page}.md", None)


def test_commands_print_what_the_document_of_registries_says(tmp_path: Path) -> None:
    with running_registry(tmp_path / "registry") as server:
        check_examples("docs/guides/registries.md", server.host)


def test_commands_print_what_the_document_of_restoring_says(tmp_path: Path) -> None:
    with running_registry(tmp_path / "registry") as server:
        check_examples("docs/guides/restore.md", server.host, port=str(free_port()))


def test_commands_print_what_the_document_of_object_storage_says(
    object_server: ObjectServer,
) -> None:
    page = "docs/guides/object-storage.md"
    check_examples(page, object_server.endpoint, OBJECTS, **object_server.environment)


@pytest.mark.skipif(
    find_spec("aiohttp") is None, reason="it is in the test group, and in the extra [serve]"
)
def test_commands_print_what_the_document_of_serving_says() -> None:
    # Only the port is another one: the commands start the server.
    check_examples("docs/guides/serve.md", None, port=str(free_port()))


def test_commands_print_what_the_reference_says(tmp_path: Path) -> None:
    if shutil.which(PROGRAM) is None:  # everything but push and pull can be checked
        check_examples(COMMANDS, None)
        return
    with running_registry(tmp_path / "registry") as server:
        check_examples(COMMANDS, server.host)


def check_examples(
    document: str,
    server: str | None,
    stated: str = REGISTRY,
    *,
    port: str = PORT,
    **environment: str,
) -> None:
    """Run the examples of a document in a new folder, with servers at other addresses than stated, or none."""
    found = [
        (name_of(page), example)
        for page in pages(document)
        for example in examples(page.read_text(encoding="utf-8"))
    ]
    if server is None:
        found = [(page, example) for page, example in found if stated not in example.command]
        server = stated
    commands = [example.command.replace(stated, server).replace(PORT, port) for _, example in found]
    # The commands sync what they write, for which a disk is waited for each time.
    with workspace() as work, workspace() as aside, quick_commands(aside) as programs:
        printed = outputs(commands, work, programs, **environment)
    printed = [output.replace(server, stated).replace(port, PORT) for output in printed]

    differences = [
        f"{page}:{example.line}: {example.command}\n{output}"
        for (page, example), output in zip(found, printed, strict=True)
        if not is_as_expected(example.expected, output)
    ]

    assert len(found) > WITH_EXAMPLES[document]
    assert differences == []


def test_every_command_has_an_example_and_a_page() -> None:
    shown = {
        command
        for document in WITH_EXAMPLES
        for page in pages(document)
        for example in examples(page.read_text(encoding="utf-8"))
        for command in re.findall(r"\bblobstore (?:--store \S+ )?(\w+)", example.command)
    }
    without_registry = {"login", "logout"}  # whose passwords the tests ask a registry for
    commands = set(program.list_commands(click.Context(program)))
    assert commands <= shown | without_registry
    assert commands == {name for page in pages(COMMANDS) for name in page.stem.split("-")} - {
        "index"
    }


def test_the_help_the_table_of_tasks_and_the_navigation_have_the_same_groups() -> None:
    def grouped(heading: str, page: str, text: str) -> dict[str, tuple[str, ...]]:
        """Return the commands of the pages under each heading."""
        found: dict[str, tuple[str, ...]] = {}
        name = ""
        for match in re.finditer(f"{heading}|{page}", text):
            name = match["heading"] or name
            if match["page"]:
                found[name] = (*found.get(name, ()), *match["page"].split("-"))
        return found

    table = (ROOT / COMMANDS / "index.md").read_text(encoding="utf-8").split("\n## ")[0]
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("commands/index.md")[1]
    page = r"(?P<page>[a-z-]+)\.md"
    of_table = grouped(r"(?m:^\| (?P<heading>[A-Z][\w ]+) \|)", rf"\]\({page}\)", table)
    of_site = grouped(r"- (?P<heading>[A-Z][\w ]+):", f"reference/commands/{page}", navigation)
    ours = {heading: tuple(names) for heading, names in GROUPS.items()}

    assert of_table == ours
    assert of_site == ours
    assert list(of_table) == list(of_site) == list(ours)
    assert {path.name for path in (ROOT / COMMANDS).glob("*.md")} == {
        path.name for path in pages(COMMANDS)
    }


@pytest.mark.parametrize("place", python_examples())
def test_examples_import_public_names_only(place: str) -> None:
    tree = ast.parse(python_examples()[place])
    imported = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    ]
    imported += [
        (alias.name, "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]

    ours = [(module, name) for module, name in imported if module.split(".")[0] == "blobstore"]

    assert [item for item in ours if item != ("blobstore", "") and not is_public(*item)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_documents_wrap_at_100_columns(path: Path) -> None:
    rows = path.read_text(encoding="utf-8").splitlines()
    in_block = False
    long = []
    for number, row in enumerate(rows, 1):
        in_block ^= row.startswith("```")
        is_fixed = in_block or row.startswith(("|", "```", "http"))  # tables cannot wrap
        if not is_fixed and len(row) > LONGEST_LINE:
            long.append(number)

    assert long == []


@pytest.mark.parametrize("front", [ROOT / "README.md", ROOT / "docs" / "index.md"], ids=name_of)
def test_the_front_pages_link_to_all_guides(front: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", front.read_text(encoding="utf-8"))
    linked = {(front.parent / link).resolve() for link in links}
    guides = {
        *(ROOT / "docs").glob("guides/**/*.md"),
        *(ROOT / "docs").glob("getting-started/*.md"),
    }

    assert guides - linked == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)

    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", ["CONTRIBUTING.md", ".devcontainer/Dockerfile"])
def test_contributors_install_what_ci_installs(path: str) -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    packages = set(re.findall(r"missing\+=\((\S+)\)", script))
    (command,) = re.findall(
        r"apt-get install (?:-y --no-install-recommends )?((?:[^\n]|(?<=\\)\n)+)",
        (ROOT / path).read_text(encoding="utf-8"),
    )
    assert len(packages) > 5
    assert packages <= set(command.split())
