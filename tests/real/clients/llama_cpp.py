"""What llama.cpp asks, by its source (`common/download.cpp`): until 2025 for a manifest, since then for refs and a tree."""

from __future__ import annotations

import json
import os
import urllib.request

URL = os.environ["HF_ENDPOINT"]
NAME = "team/chat-gguf"
AGENT = {"User-Agent": "llama-cpp", "Accept": "application/json"}


def ask(path: str, method: str = "GET", **headers: str) -> bytes:
    """Return the body of a response."""
    request = urllib.request.Request(f"{URL}/{path}", headers=headers, method=method)
    with urllib.request.urlopen(request) as answer:
        return bytes(answer.read())


file = json.loads(ask(f"v2/{NAME}/manifests/Q8_0", **AGENT))["ggufFile"]["rfilename"]
refs = json.loads(ask(f"api/models/{NAME}/refs", **AGENT))
commit = next(one["targetCommit"] for one in refs["branches"] if one["name"] == "main")
listed = json.loads(ask(f"api/models/{NAME}/tree/{commit}?recursive=true", **AGENT))
assert file in [one["path"] for one in listed if one["type"] == "file" and one["lfs"]["oid"]]
ask(f"{NAME}/resolve/{commit}/{file}", "HEAD")
ask(f"{NAME}/resolve/{commit}/{file}")
