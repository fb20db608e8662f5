"""What other programs and libraries call our commands and functions."""

from __future__ import annotations

from typing import Final

ALIASES: Final = {"ls": "list", "df": "du", "log": "history", "search": "find", "describe": "info"}
"""Other names of commands, which work."""
SYNONYMS: Final = {
    **dict.fromkeys(("add", "import", "download"), "create"),
    **dict.fromkeys(("images", "models"), "list"),
    **dict.fromkeys(("remove", "delete", "rmi", "del"), "rm"),
    **dict.fromkeys(("prune", "clean"), "gc"),
    **dict.fromkeys(("check", "fsck", "validate"), "verify"),
    **dict.fromkeys(("compress", "archive"), "freeze"),
    **dict.fromkeys(("decompress", "unfreeze"), "thaw"),
    **dict.fromkeys(("upload", "publish"), "push"),
    "save": "pack",
    **dict.fromkeys(("load", "extract"), "unpack"),
    **dict.fromkeys(("fetch", "clone"), "pull"),
    **dict.fromkeys(("watch", "subscribe", "track"), "follow"),
    "copy": "cp",
    **dict.fromkeys(("rename", "move"), "mv"),
    **dict.fromkeys(("stats", "size", "disk_usage"), "du"),
    "start": "serve",
    **dict.fromkeys(("benchmark", "ceiling", "speed"), "bench"),
    **dict.fromkeys(("html", "ui", "picture"), "page"),
    "scan": "inspect",
    "mount": "link",
    **dict.fromkeys(("server", "mirror", "proxy"), "serve"),
}
"""Names that do not work; the error says the right one."""
COMMANDS: Final = ALIASES | SYNONYMS
