"""Every instruction form that sm_90 has: the emulator against results of an H100, bit for bit."""

from __future__ import annotations

import ctypes
import json
import re
import zlib

import numpy as np
import pytest

from cute_attn.emulator import library
from tests.sweeps import FULL

from .silicon import copies
from .silicon.cases import Case, load
from .silicon.emulate import emulate
from .silicon.pack import FORMS, Output, digest, forms, unpack
from .silicon.tensormaps import (
    ADDRESS,
    ELEMENT_BYTES,
    INTERLEAVES,
    SWIZZLES,
    TensorMap,
    descriptors,
    encode,
)

PARTS = 40
ASYNCHRONOUS = ("barrier", "copy", "wgmma")
ILLEGAL = {"out-of-bounds", "misaligned", "descriptor", "assert"}
"""The checks one of which has to speak up where the GPU stops, and no other."""


def cases(part: int) -> list[Case]:
    return [c for c in load() if zlib.crc32(c.name.encode()) % PARTS == part]


def schedules(case: Case) -> tuple[int, ...]:
    """All of them in the full sweep, else the fair one and one of the others."""
    if case.family not in ASYNCHRONOUS:
        return (0,)
    return (0, 1, 2) if FULL else (0, 1 + zlib.crc32(case.name.encode()) // PARTS % 2)


def wrong(case: Case, schedule: int) -> str:
    """A description of the differences to the GPU, or nothing."""
    index, outputs = unpack()
    legal = case.name in outputs
    entry = index["cases" if legal else "failures"][case.name]
    if case.checksum != entry[0]:
        return "not what ran on the GPU: run it again"
    if legal:
        maps = [bytes.fromhex(encoded) for encoded, _ in entry[2]]
    else:
        maps = [encode(m, 0) for m in case.maps]
    output, run = emulate(case, maps, schedule=schedule, seed=case.seed)
    checks = {finding.check for finding in run.errors}
    if not legal:
        checks.discard("deadlock")  # a copy that is refused leaves its barrier waiting
        return "" if checks and checks <= ILLEGAL else f"the GPU stops; found here: {checks}"
    if not outputs[case.name].equals(output):
        return "another result"
    return "" if not checks else f"false findings: {[str(f) for f in run.errors]}"


@pytest.mark.parametrize("part", range(PARTS))
def test_equals_the_gpu_bit_for_bit(part: int):
    found = {
        (case.name, schedule): words
        for case in cases(part)
        for schedule in schedules(case)
        if (words := wrong(case, schedule))
    }
    assert found == {}


def test_any_byte_counts():
    _, outputs = unpack()
    whole = np.arange(5000, dtype=np.uint8)
    for size in (100, whole.size):
        data = whole[:size]
        kept = Output(size, data[:2048], digest(data) if size > 2048 else "")
        assert kept.equals(data)
        for place in (0, size - 1):
            other = data.copy()
            other[place] ^= 1
            assert not kept.equals(other)
    assert {bool(kept.digest) for kept in outputs.values()} == {False, True}
    assert all(kept.digest or kept.start.nbytes == kept.size for kept in outputs.values())


def test_what_the_gpu_refused_is_what_was_meant_to_be_illegal():
    index, _ = unpack()
    assert {c.name for c in load() if c.refused} == index["failures"].keys()
    stopped = re.compile(r"CUDA_ERROR_(ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|ILLEGAL_ADDRESS|"
                         r"LAUNCH_FAILED) ")  # fmt: skip
    assert [words for _, words in index["failures"].values() if not stopped.match(words)] == []


def test_nothing_is_lost():
    index, outputs = unpack()
    assert len(outputs) == len(index["cases"]) > 3400
    assert {case.family for case in load() if case.name in outputs} >= {
        "integer", "float", "convert", "warp", "barrier", "memory", "copy", "mma", "wgmma",
    }  # fmt: skip
    names = {case.name for case in load()}
    assert names == outputs.keys() | index["failures"].keys()


# ---- tensor maps


def driver_maps() -> list[tuple[TensorMap, int, bytes]]:
    """Map, address, and what the driver made of them; it refuses a few."""
    index, _ = unpack()
    found = [
        (m, ADDRESS + m.offset, text)
        for m, text in zip(descriptors(), index["descriptors"], strict=True)
    ]
    for case in load():
        if case.maps and case.name in index["cases"]:
            encodings = index["cases"][case.name][2]
            found += [(m, at, text) for m, (text, at) in zip(case.maps, encodings, strict=True)]
    return [(m, at, bytes.fromhex(text)) for m, at, text in found if "refuses" not in text]


def test_tensor_maps_are_read_as_the_driver_was_asked_for_them():
    maps = driver_maps()
    assert len(maps) > 500
    decode = library.engine().library.emu_tensor_map
    for m, address, encoded in maps:
        fields = (ctypes.c_int64 * 34)()
        assert decode(encoded, fields), m
        assert list(fields) == _expected(m, address), m


_ENGINE_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32ftz", "f64", "bf16",
                 "tf32", "tf32ftz")  # fmt: skip


def _expected(m: TensorMap, address: int) -> list[int]:
    """The fields that emu_tensor_map gives."""

    def five(values: tuple[int, ...], rest: int = 0) -> list[int]:
        return [*values, *(rest,) * (5 - len(values))]

    head = [
        address, m.rank, _ENGINE_TYPES.index(m.element), m.corners is not None,
        INTERLEAVES.index(m.interleave), SWIZZLES.index(m.swizzle), m.nan_fill,
    ]  # fmt: skip
    strides = (ELEMENT_BYTES[m.element], *m.strides)
    steps = m.steps or (1,) * m.rank
    corners = [[*c, *(0,) * (3 - len(c))] for c in m.corners or ((), ())]
    pixels, box = (m.box[1], (m.box[0],)) if m.corners else (1, m.box)
    return [
        *head, pixels, *five(m.sizes), *five(strides), *five(box), *five(steps), *corners[0],
        *corners[1],
    ]  # fmt: skip


def test_tensor_maps_are_encoded_as_the_driver_does():
    """The refused cases get theirs from this encoder."""
    for m, address, encoded in driver_maps():
        assert encode(m, address)[:64] == encoded[:64], m


def test_rows_stored_at_one_address_are_a_race() -> None:
    """Loads and reductions of a dimension with stride 0 are fine, and among the cases."""
    repeats = TensorMap("u32", (40, 5, 3), (0, 160), (32, 4, 2))
    for operation, expected in (("", {"race"}), (".add", set())):
        case = copies._store(repeats, [(0, 0, 0)], operation)
        _, run = emulate(case, [encode(m, 0) for m in case.maps])
        assert {finding.check for finding in run.errors} == expected


# ---- the table of forms


def test_the_forms_compared_are_current():
    index, _ = unpack()
    kept = [tuple(row) for row in json.loads(FORMS.read_text())]
    assert kept == forms(index), "run python -m tests.emulator.silicon.pack"
