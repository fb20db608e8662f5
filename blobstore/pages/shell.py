"""The frame of a page: one HTML file with its style, script and data, and no access to anything else.

Three walls keep text from files from being run. Data is JSON in which ``<``, ``>`` and ``&`` are
escaped, so that it cannot end its element. The script creates elements and writes texts, and never
parses markup. The Content-Security-Policy allows only the script and the style with these digests, and
no connection; Trusted Types stop the script from parsing markup even by mistake.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from pathlib import Path
from typing import Any

_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript><p>This page draws its pictures with a script. The commands "blobstore du", "blobstore show"
and "blobstore compare" print the same numbers.</p></noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def render_page(title: str, data: dict[str, Any], *, is_live: bool = False) -> str:
    """Return the page of some data.

    Args:
        title: any text.
        data: what the views returned, by the names of the views.
        is_live: whether the page may ask the server that it comes from for more.
    """
    style, script = _asset("page.css"), _asset("page.js")
    connect = "; connect-src 'self'" if is_live else ""
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'{connect}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return _PAGE.format(
        policy=html.escape(policy, quote=True).replace("&#x27;", "'"),
        title=html.escape(title),
        style=style,
        script=script,
        data=encode(data),
    )


def encode(data: Any) -> str:
    """Return JSON that may stand in an HTML element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate(_ESCAPES)


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
