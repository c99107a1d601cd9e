"""Every instruction form that sm_90 has: the emulator against results of an H100, bit for bit."""

from __future__ import annotations

import ctypes
import json
import zlib

import pytest

from cute_attn.emulator import machine

from .silicon.cases import Case, load
from .silicon.emulate import emulate
from .silicon.pack import FORMS, forms, unpack
from .silicon.tensormaps import ADDRESS, ELEMENT_BYTES, SWIZZLES, TensorMap, descriptors

PARTS = 40
ILLEGAL = {"out-of-bounds", "misaligned", "descriptor", "assert", "deadlock"}
"""The checks that may speak up where the GPU stops. (A copy refused leaves its barrier waiting.)"""


def cases(part: int) -> list[Case]:
    return [c for c in load() if zlib.crc32(c.name.encode()) % PARTS == part]


def wrong(case: Case) -> str:
    """What does not agree with the GPU, or nothing."""
    index, outputs = unpack()
    legal = case.name in outputs
    entry = index["cases" if legal else "failures"][case.name]
    if case.checksum != entry[0]:
        return "not what ran on the GPU: run it again"
    maps = [bytes.fromhex(encoded) for encoded, _ in entry[2]] if legal else _encoded(case)
    output, run = emulate(case, maps)
    checks = {finding.check for finding in run.errors}
    if not legal:
        return "" if checks and checks <= ILLEGAL else f"the GPU stops; found here: {checks}"
    if not outputs[case.name].equals(output):
        return "another result"
    return "" if not checks else f"false findings: {[str(f) for f in run.errors]}"


def _encoded(case: Case) -> list[bytes]:
    """A refused case's maps: those of an accepted case with the same, or as of the index."""
    index, _ = unpack()
    found = {
        repr(m): bytes.fromhex(encoded)
        for other in load()
        if other.name in index["cases"]
        for m, (encoded, _) in zip(other.maps, index["cases"][other.name][2], strict=True)
    }
    return [found[repr(m)] for m in case.maps]


@pytest.mark.parametrize("part", range(PARTS))
def test_equals_the_gpu_bit_for_bit(part: int):
    found = {case.name: words for case in cases(part) if (words := wrong(case))}
    assert found == {}
