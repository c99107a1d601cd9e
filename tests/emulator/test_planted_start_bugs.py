"""Bugs planted where segments start from zero: each must fail the comparison with float64.

As in `test_planted_kda_bugs`, a bug is an edit of the PTX text.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from cute_attn.emulator import Emulator
from tests.ops.test_segments_from_zero import CHUNK, FLAGS, check, inputs, starts_every

PASS, PREPARE = "HeadStatePass", "HeadPrepare"
BOUND = "0fC2200000"  # -40


class Bug(NamedTuple):
    """An edit of a kernel: `pattern` becomes `other`."""

    kernel: str
    pattern: str
    other: str
    log2_of_chunk: float  # of the head on which the bug shows


BUGS = {
    "a bound of 2^-0.05": Bug(PASS, BOUND, "0fBD4CCCCD", -0.1),
    "any beta": Bug(PREPARE, r"(setp\.gtu\.f32\s.*)0f40000000", r"\g<1>0f7F800000", -30.0),
    "a warm-up of one chunk for two": Bug(PASS, r"(selp.*, )2(, )", r"\g<1>1\2", -20.1),
}


def arguments(bug: str) -> dict[str, Any]:
    x = inputs(False, [-200.0, BUGS[bug].log2_of_chunk], [3 * CHUNK])
    if bug == "any beta":
        x["beta"] = x["beta"].sigmoid()
        x["beta"][:, :40, 1] = 20.0
        x["initial_state"] *= 2.0**20
    if bug == "a warm-up of one chunk for two":
        x["v"][:, :CHUNK] *= 2.0**20
    return x


def play(bug: str, plant: bool, from_zero: bool) -> None:
    load = Emulator.load_object
    kernel, pattern, other, *_ = BUGS[bug]
    edits = 0

    def changed(self: Emulator, image: bytes, ptx: str, function: str, names: Any) -> Any:
        nonlocal edits
        if plant and kernel in ptx:
            ptx, count = re.subn(pattern, other, ptx)
            edits += count
        return load(self, image, ptx, function, names)

    with pytest.MonkeyPatch.context() as patch, starts_every(2, 2) as made:
        patch.setattr(Emulator, "load_object", changed)
        patch.setitem(FLAGS, "use_beta_sigmoid_in_kernel", bug != "any beta")
        check(arguments(bug), made, [True, from_zero])
    assert bool(edits) == plant


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    play(bug, False, bug == "a warm-up of one chunk for two")
    with pytest.raises(AssertionError, match=r"<= \(\(2 \*"):
        play(bug, True, True)
