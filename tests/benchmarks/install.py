"""What an installation takes, and what it costs to start: blobstore, its extras, and the client of the Hub.

Each is installed in an environment of its own, from the package index. Times are those of whole processes above
one that does nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.benchmarks import common

ROOT = Path(__file__).parents[2]
CASES = {
    "blobstore": (str(ROOT), "blobstore", "blobstore"),
    "blobstore[hub]": (f"{ROOT}[hub]", "blobstore", "blobstore"),
    "blobstore[all]": (f"{ROOT}[all]", "blobstore", "blobstore"),
    "huggingface_hub": ("huggingface-hub", "huggingface_hub", "hf"),
}
"""What is installed, the module that is imported and the command that shows its help."""


def install(folder: Path, requirement: str) -> tuple[Path, int, int]:
    """Install a requirement; return the folder of its programs, the packages, and their bytes."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    programs = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(programs / "python")]
    constraints = ["-c", str(ROOT / "tests" / "constraints.txt")]
    subprocess.run([*pip, "install", *constraints, requirement], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    size = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())
    return programs, len(list(packages.glob("*.dist-info"))), size


def main() -> None:
    """Print the sizes, and the times of interleaved rounds."""
    arguments = common.arguments(__doc__)
    with common.workspace(arguments.folder) as folder:
        commands: dict[str, list[object]] = {}
        print("| installed | packages | MB |\n| --- | --- | --- |")
        for name, (requirement, module, program) in CASES.items():
            programs, packages, size = install(folder / name, requirement)
            print(f"| `{name}` | {packages} | {size / 1e6:.1f} |")
            commands[f"{name}: nothing"] = [programs / "python", "-c", "pass"]
            commands[f"{name}: import {module}"] = [programs / "python", "-c", f"import {module}"]
            commands[f"{name}: {program} --help"] = [programs / program, "--help"]
        print()

        def run(command: list[object]) -> float:
            return common.timed(
                lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # type: ignore[arg-type]
            )

        cases = {name: (lambda command=command: run(command)) for name, command in commands.items()}
        common.table(common.rounds(cases, arguments.rounds), "blobstore: nothing")


if __name__ == "__main__":
    main()
