"""What users of oras-py do."""

from __future__ import annotations

import importlib
import os
import sys

name = f"{os.environ['SERVE_HOST']}/team/chat"
client = importlib.import_module("oras.client").OrasClient(insecure=True, tls_verify=False)
tags = client.get_tags(name)
pulled = client.pull(f"{name}:latest", outdir="pulled")
sys.stdout.write(f"{tags}: {len(pulled)} files\n")
