from __future__ import annotations

import pickletools

from blobstore.unpickler import opcodes
from blobstore.unpickler.opcodes import NAMES, REFUSED


def test_has_the_opcodes_of_the_standard_library_and_no_others() -> None:
    expected = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
    assert expected == NAMES


def test_names_each_opcode_by_its_constant() -> None:
    assert len(NAMES) == 68
    for code, name in NAMES.items():
        assert getattr(opcodes, name) == code


def test_rejects_the_opcodes_that_reach_out_of_the_file() -> None:
    refused = {NAMES[code] for code in REFUSED}
    assert refused == {"OBJ", "PERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
