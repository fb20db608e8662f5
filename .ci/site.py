"""What mkdocs cannot do alone for the site of the documentation: links to the repository, and generated pages.

In the repository, a page may link to a test or a module. On the site such a link leads to the file in
the repository if ``repo_url`` is set in mkdocs.yml; otherwise only its text is left.
"""

from __future__ import annotations

import json
import posixpath
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blobstore.cli.main import program

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^):#]+)\)")
_PICTURE = re.compile(r"^!\[[^\]]+\]\((\S+)\.png\)$", re.MULTILINE)
_HELP = re.compile(r"On the site, the texts follow\.\s+<!-- help of all commands -->")
_NOTEBOOK = re.compile(r"\A.*<!-- notebook (\S+) -->", re.DOTALL)
_NAMES = re.compile(r"<!-- names of ([\w.]+) -->")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Return a page whose links lead to other pages or to the repository, with the help where it belongs."""

    def replaced(link: re.Match[str]) -> str:
        folder = posixpath.dirname(f"docs/{page.file.src_uri}")
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target.startswith("docs/") and not target.endswith(".py"):
            return link[0]
        if config.repo_url:
            return f"[{link[1]}]({config.repo_url.rstrip('/')}/blob/main/{target})"
        return link[1]

    markdown = _NOTEBOOK.sub(lambda found: notebook(Path(config.docs_dir, found[1])), markdown)
    folder = Path(config.docs_dir, page.file.src_uri).parent
    markdown = _PICTURE.sub(lambda found: in_both_schemes(found, folder), markdown)
    if _HELP.search(markdown):
        page.meta["hide"] = ["toc"]  # its texts need the whole width
    text = _HELP.sub(lambda _: help_of_commands(), _LINK.sub(replaced, markdown))
    return _NAMES.sub(lambda found: public_names(found[1]), text)


def on_page_content(html: str, **_: Any) -> str:
    """Return a page without the roles of Sphinx, which docstrings have for editors."""
    return re.sub(r":(?:func|class|meth|data|mod|attr):(?=<code>)", "", html)


def in_both_schemes(picture: re.Match[str], folder: Path) -> str:
    """Return a picture, and the one for the dark scheme if there is one, each for its scheme."""
    light, dark = f"{picture[1]}.png", f"{picture[1]}-dark.png"
    if not folder.joinpath(dark).exists():
        return picture[0]
    shown = picture[0].replace(light, f"{light}#only-light")
    return f"{shown}\n{picture[0].replace(light, f'{dark}#only-dark')}"


def notebook(path: Path) -> str:
    """Return a notebook as a page: its texts, its code, and the outputs that it holds."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("data", {"text/plain": output.get("text")})
            picture = shown.get("text/html")
            plain = "".join(shown["text/plain"]).rstrip("\n")
            parts.append("".join(picture) if picture else f"```text\n{plain}\n```")
    return "\n\n".join(parts)


def public_names(module: str) -> str:
    """Return what mkdocstrings expands to the functions and classes of a module."""
    home = import_module(module)
    names = home.__all__
    sections = []
    for title, is_function in (("Functions", True), ("Classes", False)):
        chosen = [name for name in names if name[0].islower() == is_function]
        sections.append(f"## {title}")
        sections += [f"::: {module}.{name}{_filters(getattr(home, name))}" for name in chosen]
    return "\n\n".join(sections)


def _filters(value: Any) -> str:
    """Return the options that leave out what ``dir()`` does not list of the objects of a class."""
    if not isinstance(value, type) or value.__dir__ is object.__dir__:
        return ""
    hidden = "|".join(sorted({*dir(value)} - {*dir(value.__new__(value))}))
    return f"\n    options:\n      filters: ['!^_[^_]', '!^({hidden})$']\n      inherited_members: true"


def help_of_commands() -> str:
    """Return a section with the help text of each command."""
    parent = click.Context(program, info_name="blobstore", terminal_width=90, max_content_width=90)
    sections = []
    for name in program.list_commands(parent):
        if (command := program.get_command(parent, name)) is not None:
            context = click.Context(command, info_name=name, parent=parent)
            sections.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(sections)
