"""What users of huggingface_hub 0.17 and later do; prints how each call ended. Needs HF_ENDPOINT and HF_HOME."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub as hub

MODEL = "team/chat"
api: Any = hub.HfApi(endpoint=os.environ["HF_ENDPOINT"])
files = hub.HfFileSystem(endpoint=os.environ["HF_ENDPOINT"])
commit = api.model_info(MODEL).sha


def read() -> bytes:
    """Read a part of a file."""
    with files.open(f"{MODEL}/config.json", "rb") as file:
        file.seek(3)
        return bytes(file.read(9))


CALLS: dict[str, Callable[[], Any]] = {
    "download": lambda: Path(hub.snapshot_download(MODEL)).name == commit,
    "download of a commit": lambda: hub.hf_hub_download(MODEL, "config.json", revision=commit),
    "download of HEAD": lambda: hub.hf_hub_download(MODEL, "config.json", revision="HEAD"),
    "info": lambda: (
        (info := api.model_info(MODEL)).pipeline_tag,
        getattr(info, "library_name", 0),
    ),
    "info with sizes": lambda: api.model_info(MODEL, files_metadata=True).siblings[0].size,
    "info with security": lambda: api.model_info(MODEL, securityStatus=True).id,
    "info expanded": lambda: (
        api.model_info(MODEL, expand=["safetensors", "config"]).safetensors.total
    ),
    "list": lambda: [one.id for one in api.list_models(author="team")],
    "list filtered": lambda: [one.id for one in api.list_models(filter="text-generation")],
    "list searched": lambda: [
        (one.id, one.pipeline_tag)
        for one in api.list_models(search="chat", sort="downloads", limit=1, full=True)
    ],
    "list by date": lambda: [
        one.id for one in api.list_models(sort="lastModified", cardData=True, fetch_config=True)
    ],
    "tree": lambda: [one.path for one in api.list_repo_tree(MODEL, recursive=True, expand=True)],
    "files": lambda: api.list_repo_files(MODEL),
    "files info": lambda: [one.rfilename for one in api.list_files_info(MODEL, expand=True)],
    "paths": lambda: [one.path for one in api.get_paths_info(MODEL, ["config.json", "none"])],
    "paths expanded": lambda: [
        one.last_commit.oid == commit
        for one in api.get_paths_info(MODEL, ["config.json"], expand=True)
    ],
    "refs": lambda: api.list_repo_refs(MODEL).branches[0].name,
    "commits": lambda: [one.commit_id == commit for one in api.list_repo_commits(MODEL)],
    "access": lambda: api.auth_check(MODEL),
    "access to none": lambda: api.auth_check("team/none"),
    "discussions": lambda: list(api.get_repo_discussions(MODEL)),
    "exists": lambda: (api.repo_exists(MODEL), api.repo_exists("team/none")),
    "file exists": lambda: (api.file_exists(MODEL, "config.json"), api.file_exists(MODEL, "no")),
    "no revision": lambda: api.model_info(MODEL, revision="none"),
    "no file": lambda: hub.hf_hub_download(MODEL, "none.json"),
    "fs ls": lambda: files.ls(MODEL),
    "fs info": lambda: files.info(f"{MODEL}/config.json")["size"],
    "fs modified": lambda: files.modified(f"{MODEL}/config.json"),
    "fs read": read,
    "safetensors": lambda: sum(api.get_safetensors_metadata(MODEL).parameter_count.values()),
    "checksums": lambda: api.verify_repo_checksums(MODEL).checked_count,
    "whoami": lambda: api.whoami(token="hf_any")["name"],
    "login": lambda: hub.login(token="hf_any", add_to_git_credential=False),
}
for name, call in CALLS.items():
    try:
        outcome = str(call())
    except Exception as error:  # noqa: BLE001 - it is what the client decides
        outcome = type(error).__name__
    sys.stdout.write(f"{name}: {outcome[:150]}\n")
