"""Records what the installed clients ask a server for.

    python -m tests.real.record_clients [CLIENT ...] [--answers]

Writes ``tests/data/serve/CLIENT-VERSION.json``. With ``--answers``, no client runs: the logs that are there get the
responses of today. Look at the difference before you commit it. vLLM has an environment of its own:
``.ci/vllm`` makes it.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from blobstore.serve.library import Library
from tests.support.recorded_clients import (
    LOGS,
    MODEL,
    answered,
    blob_of_ollama,
    load_log,
    recorded_library,
    recording,
    save_log,
)
from tests.support.registry import proxied_registry

HUB = """
from huggingface_hub import HfApi, HfFileSystem, get_safetensors_metadata, hf_hub_download, snapshot_download
api = HfApi()
snapshot_download(MODEL)
snapshot_download(MODEL)
hf_hub_download(MODEL, "config.json", force_download=True)
hf_hub_download(MODEL, "config.json", revision="int8")
api.list_models(author="org")
api.list_repo_refs(MODEL)
api.repo_exists(MODEL), api.file_exists(MODEL, "none"), api.revision_exists(MODEL, "none")
api.repo_exists("org/none")
list(api.list_repo_tree(MODEL, recursive=True))
api.model_info(MODEL, files_metadata=True)
api.get_paths_info(MODEL, ["config.json", "none"])
api.verify_repo_checksums(MODEL)
get_safetensors_metadata(MODEL)
files = HfFileSystem(endpoint=os.environ["HF_ENDPOINT"])
files.ls(MODEL), files.info(f"{MODEL}/config.json")
with files.open(f"{MODEL}/config.json", "rb") as file:
    file.seek(9), file.read(20)
"""
TRANSFORMERS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
"""
MLX = """
from mlx_lm import load
load(MODEL)
"""
VLLM = """
from vllm import LLM
LLM(MODEL, enforce_eager=True, max_model_len=32, num_gpu_blocks_override=64)
"""
ORAS = """
import oras.client
client = oras.client.OrasClient(insecure=True, tls_verify=False)
client.get_tags(f"{HOST}/{MODEL.lower()}")
client.pull(f"{HOST}/{MODEL.lower()}:latest", outdir=FOLDER)
"""
DOCKER = "application/vnd.docker.distribution.manifest.v2+json"


def python(code: str) -> Callable[[str, Path], None]:
    """Return what runs a program in a process of its own, with an empty cache."""

    def run(host: str, folder: Path) -> None:
        names = {"MODEL": MODEL, "HOST": host, "FOLDER": str(folder)}
        lines = ["import os", *(f"{name} = {text!r}" for name, text in names.items())]
        environment = os.environ | {"HF_ENDPOINT": f"http://{host}", "HF_HOME": str(folder / "hub")}
        program = "\n".join([*lines, textwrap.dedent(code)])
        subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, check=True)

    return run


def skopeo(host: str, folder: Path) -> None:
    """Copy, mirror and describe."""
    name, plain = f"docker://{host}/{MODEL.lower()}", "--src-tls-verify=false"
    for tag in ("latest", "latest.image"):
        subprocess.run(
            ["skopeo", "copy", plain, f"{name}:{tag}", f"dir:{folder}/{tag}"], check=True
        )
    described = ["skopeo", "inspect", "--tls-verify=false", f"{name}:latest.image"]
    subprocess.run(described, check=True, capture_output=True)
    source = name.removeprefix("docker://")
    mirrored = ["skopeo", "sync", "--src=docker", "--dest=dir", plain, source, f"{folder}/all"]
    subprocess.run(mirrored, check=True)


def docker_registry(host: str, folder: Path) -> None:
    """Pull through a registry that is a proxy."""
    with proxied_registry(folder, f"http://{host}") as proxy:
        name = f"docker://{proxy.host}/{MODEL.lower()}:latest"
        copied = ["skopeo", "copy", "--src-tls-verify=false", name, f"dir:{folder}/copy"]
        subprocess.run(copied, check=True)


def ollama(host: str, _: Path) -> None:
    """Ask as ``ollama pull`` does, by its source: ``server/download.go`` and ``x/imagegen/transfer``."""
    agent = {"User-Agent": "ollama/0.33.0 (amd64 linux) Go/go1.24.1"}

    def ask(method: str, target: str, **headers: str) -> None:
        connection = http.client.HTTPConnection(host)
        connection.request(method, target, headers=headers)
        assert connection.getresponse().status in (200, 206)
        connection.close()  # without the body: this is how it looks for a redirect

    for name in ("library/ollama", MODEL):
        ask("GET", f"/v2/{name}/manifests/latest", Accept=DOCKER, **agent)
    blob = f"/v2/library/ollama/blobs/{blob_of_ollama()}"
    ask("HEAD", blob, **agent)
    ask("GET", blob, **agent)
    ask("GET", blob, Range="bytes=0-19", **{"User-Agent": "Go-http-client/1.1"})


CLIENTS: dict[str, Callable[[str, Path], None]] = {
    "huggingface_hub": python(HUB),
    "transformers": python(TRANSFORMERS),
    "mlx-lm": python(MLX),
    "vllm": python(VLLM),
    "oras": python(ORAS),
    "skopeo": skopeo,
    "docker-registry": docker_registry,
    "ollama": ollama,
}


def version_of(client: str) -> str:
    """Return the version of an installed client, empty if it is not installed."""
    if client == "ollama":
        return "0.33"
    if shutil.which(client):
        command = [client, "--version"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"\d+(?:\.\d+)+", output)
        return found[0] if found else "0"
    try:
        return importlib.metadata.version(client)
    except importlib.metadata.PackageNotFoundError:
        return ""


def record(client: str, library: Library, folder: Path) -> None:
    """Run a client, and write its log."""
    version = version_of(client)
    if not version:
        sys.stdout.write(f"{client} is not installed\n")
        return
    with recording(library) as (host, entries):
        CLIENTS[client](host, folder)
    save_log(f"{client}-{version}", entries, library)
    sys.stdout.write(f"{client} {version}: {len(entries)} requests\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Record clients, or the responses to what was recorded."""
    parser = argparse.ArgumentParser(prog="python -m tests.real.record_clients")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--answers", action="store_true", help="record responses alone")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        library = recorded_library(Path(name))
        if options.answers:
            for path in sorted(LOGS.glob("*.json")):
                entries = load_log(path, library)
                save_log(path.stem, [answered(library, entry) for entry in entries], library)
            return
        for client in options.clients or CLIENTS:
            record(client, library, Path(tempfile.mkdtemp(dir=name)))


if __name__ == "__main__":
    main()
