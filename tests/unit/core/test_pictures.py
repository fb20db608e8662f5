"""Tests of the pictures of objects, which code of a higher level draws."""

from __future__ import annotations

import subprocess
import sys

from blobstore.core import pictures


def test_an_object_that_nothing_draws_has_no_picture() -> None:
    assert pictures.draw("nothing", object()) == ""


def test_the_function_is_imported_when_it_is_needed() -> None:
    code = """
import sys
from blobstore.core import pictures
pictures.register("shape", "textwrap", "dedent")
assert "textwrap" not in sys.modules
print(pictures.draw("shape", "  <svg/>"))
"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)

    assert done.stdout == "<svg/>\n"
