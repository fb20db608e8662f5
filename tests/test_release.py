"""What is released: the metadata, the bill of materials, the changelog and what the documents promise."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from blobstore.archives import table as archives
from blobstore.compression import quant_rule, scaled_rules, table
from blobstore.gguf import header
from blobstore.manifests import lock_file, media_types
from blobstore.manifests.model import SCHEMA_VERSION
from blobstore.remotes import cold_layers
from blobstore.signatures import policy

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COMPATIBILITY = (ROOT / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
FRAGMENT = re.compile(r"\+[a-z0-9-]+\.(added|changed|deprecated|removed|fixed|security)\.md")


def prefix_versions(*prefixes: bytes) -> str:
    return ", ".join(str(prefix[-1]) for prefix in prefixes)


def media_version(media_type: str) -> str:
    found = re.search(r"\.v(\d+)(\+json)?$", media_type)
    assert found is not None
    return found[1]


# What the code reads, by the names of the table.
READ = {
    "manifest": str(SCHEMA_VERSION),
    "files of a model that are not JSON": media_version(media_types.FILE),
    "record of the source": media_version(media_types.SOURCE),
    "stacks of experts": media_version(media_types.STACKS),
    "cold blob": prefix_versions(*table.PREFIXES),
    "rule that quantizes weights": ", ".join(
        map(str, [*quant_rule._VERSIONS, scaled_rules._AFFINE, scaled_rules._FLOAT8])
    ),
    "cold layer in a registry": media_version(cold_layers.COLD),
    "list of cold layers of bases": media_version(cold_layers.COLD_BASES),
    "archive": prefix_versions(archives.PREFIX),
    "lock file": str(lock_file.VERSION),
    "policy of signatures": str(policy.VERSION),
    "GGUF": ", ".join(map(str, header._VERSIONS)),
}


def test_the_table_of_formats_says_what_the_code_reads_and_writes() -> None:
    rows = re.findall(r"^\| (.+?) \| .+? \| (.+?) \| ([\d, ]+) \|$", COMPATIBILITY, re.MULTILINE)
    read = {re.sub(r"\[(.+?)\]\(.+?\)", r"\1", name): versions for name, _, versions in rows}

    assert read == READ
    assert all(
        written in (versions, "written by hand", "as imported") for _, written, versions in rows
    )


def test_the_documents_and_classifiers_name_the_pythons_that_are_tested() -> None:
    start = "Programming Language :: Python :: 3."
    pythons = [line for line in PROJECT["project"]["classifiers"] if line.startswith(start)]
    names = [line.rpartition(" ")[2] for line in pythons]

    assert PROJECT["project"]["requires-python"] == f">={names[0]}"
    assert f"Python {', '.join(names[:-1])} and {names[-1]}" in COMPATIBILITY
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert workflow.count(json.dumps(names)) == 2


def test_the_bill_of_materials_is_valid_and_has_the_version() -> None:
    # Each worker that collects would need seconds to compile the grammars of all texts that JSON schemas know.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = (ROOT / ".ci" / "release" / "sbom.cdx.json").read_text(encoding="utf-8")
    component: dict[str, Any] = json.loads(text)["metadata"]["component"]

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert component["version"] == PROJECT["project"]["version"]
    assert component["purl"].endswith(f"@{component['version']}")


def test_vendored_code_has_a_licence_and_is_in_the_bill_of_materials() -> None:
    parts = json.loads((ROOT / ".ci" / "release" / "sbom.cdx.json").read_bytes())["components"]

    assert {f"LICENSE.{part['name']}" for part in parts} | {"LICENSE"} == set(
        PROJECT["project"]["license-files"]
    )
    for part in parts:
        assert part["copyright"] in (ROOT / f"LICENSE.{part['name']}").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "changelog.d").iterdir()), ids=lambda path: path.name
)
def test_fragments_of_the_changelog_have_names_that_towncrier_takes(path: Path) -> None:
    assert path.name == "README.md" or FRAGMENT.fullmatch(path.name)
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 100
