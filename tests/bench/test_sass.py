import json

import pytest

from cute_attn.bench import peers, sass
from cute_attn.bench.__main__ import main
from cute_attn.bench.attention import hd256_backward as backward
from cute_attn.bench.attention import hd256_forward as forward
from cute_attn.bench.attention import sm90_tiles
from cute_attn.bench.attention.analysis import Analysed, analyse
from cute_attn.bench.attention.hd256_forward import SHORT
from cute_attn.bench.attention.programs import OURS, THEIRS, Program
from cute_attn.bench.harness.registry import EXIT_UNAVAILABLE
from cute_attn.machine_code import tile_model as model
from cute_attn.machine_code.disassembly import DisassemblyError, find_nvdisasm
from cute_attn.machine_code.tile_model import HD256_FORWARD
from tests.emulator.peer_captures import DIRECTORY, SASS, capture
from tests.machine_code.made import WAIT, loop, made

CAPTURES = DIRECTORY / forward.ARCH


def test_without_nvdisasm_it_says_what_to_install(monkeypatch, capsys):
    def none():
        raise DisassemblyError("needs nvdisasm, of ...")

    monkeypatch.setattr(sass, "find_nvdisasm", none)
    assert main(["sass", "hd256-fwd", "--print-only"]) == EXIT_UNAVAILABLE
    assert "needs nvdisasm" in capsys.readouterr().err


def program(kernel, specialisation, **facts):
    known = {"registers": 168, "stack": 0, "spilled": 0, "shared": 230000, **facts}
    return Program(kernel, specialisation, "", b"", "", **known)


def analysed(kernel, specialisation, function=None, **facts):
    counted = model.count_kernel(function or made(), HD256_FORWARD)
    clocks = [model.clocks(counted, HD256_FORWARD, rescale=share) for share in (0.0, 1.0)]
    cost = model.TileCost(counted, *clocks, shapes_checked=True)
    return Analysed(program(kernel, specialisation, **facts), cost, HD256_FORWARD)


def slow():
    """A kernel whose exponentials take longer than its MMAs."""
    body = [WAIT, *["LDTM.x32 R4, tmem[UR4]"] * 4, *["MUFU.EX2 R0, R1"] * 300]
    return made(masked=[], softmax=loop(".L_softmax", *body))


def passed(*found):
    short = [s for s in forward.FORWARD if s.name in SHORT]
    return [v.passed for v in sass.verdicts(found, short)]


def test_verdicts():
    ours = [analysed(OURS, name) for name in SHORT]
    theirs = [analysed(THEIRS, name, spilled=None) for name in SHORT]
    assert passed(*ours, *theirs) == [True, True, True, True]
    assert passed(*ours) == [True, None, None, None]
    assert passed(ours[0], analysed(OURS, "causal", slow()), *theirs)[:3] == [
        True,
        True,
        False,
    ]
    for facts in ({"spilled": 4}, {"spilled": None}, {"stack": 8}):
        assert passed(analysed(OURS, "non-causal", **facts), ours[1], *theirs)[0] is False


def test_every_specialisation_is_a_spec():
    from cute_attn.kernels.attention.spec import Hd256ForwardSpec

    names = [s.name for s in forward.FORWARD]
    assert len(set(names)) == len(names)
    specs = [Hd256ForwardSpec(**{**forward.PLAIN, **s.ours}) for s in forward.FORWARD]
    assert len(set(specs)) == len(specs)
    with_peer = {s.name for s in forward.FORWARD if s.theirs is not None}
    assert all((s.theirs is None) == (s.beside in with_peer) for s in forward.FORWARD)


@pytest.fixture(scope="module")
def nvdisasm():
    pytest.importorskip("cutlass")
    try:
        return find_nvdisasm()
    except DisassemblyError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def captures():
    """Theirs, compiled in one process."""
    if not peers.missing("flash_attention_4"):
        capture(SASS[0], SASS)
    return CAPTURES


def check(specialisations, nvdisasm):
    """Our kernels do not spill, and their busiest unit takes no more clocks than theirs."""
    programs = [forward.our_program(s) for s in specialisations]
    assert [(p.specialisation, p.spilled, p.stack) for p in programs] == [
        (s.name, 0, 0) for s in specialisations
    ]
    try:
        theirs, missing = forward.their_programs(specialisations, CAPTURES)
    except ImportError as reason:
        pytest.skip(str(reason))
    assert missing == []
    found = [analyse(p, nvdisasm, HD256_FORWARD) for p in (*programs, *theirs)]
    assert all(a.tile.shapes_checked for a in found)
    missed = [v for v in sass.verdicts(found, specialisations) if v.passed is not True]
    assert missed == []


@pytest.mark.slow  # it compiles theirs
@pytest.mark.timeout(900)
def test_ours_is_not_above_theirs_and_does_not_spill(nvdisasm, captures):
    check([s for s in forward.FORWARD if s.name in SHORT], nvdisasm)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_specialisation_is_above_theirs_or_spills(nvdisasm):
    check(forward.FORWARD, nvdisasm)


@pytest.mark.slow  # it compiles theirs; that of the tiles on sm_90a is quick
@pytest.mark.timeout(900)
def test_the_whole_benchmark(nvdisasm, captures, tmp_path):
    argv = ["sass", "hd256-fwd", "--short", "--captures", str(captures), "--out", str(tmp_path)]
    assert main(argv) == 0
    report = json.loads(next(tmp_path.rglob("sass-hd256-fwd*.json")).read_text())
    ours = [row for row in report["rows"] if row["kernel"] == OURS]
    assert [row["specialisation"] for row in ours] == list(SHORT)
    assert "nothing is measured" in report["title"]


# -- the backward ---------------------------------------------------------------------------------


def part(kernel, specialisation, geometry, name, bound):
    cost = model.TileCost(
        model.KernelCount({}, None, 0, 0), model.Clocks({"mma": bound}, bound), None, True
    )
    return Analysed(program(kernel, specialisation), cost, geometry, name)


def parts(ours_key=2048.0, which="dense"):
    """The parts of both kernels, with the clocks of the design's model."""
    return [
        part(OURS, which, backward.OUR_DQ, backward.DQ, 3072.0),
        part(OURS, which, backward.OUR_VALUE_PAIR, backward.VALUE, 2000.0),
        part(OURS, which, backward.OUR_KEY_PAIR, backward.KEY, ours_key),
        part(THEIRS, which, backward.THEIR_DQ, backward.DQ, 3072.0),
        part(THEIRS, which, backward.THEIR_DKDV, backward.DKDV, 3072.0),
    ]


def test_the_slower_pair_and_both_kernels_count():
    """In the causal step our larger tiles of keys have 2 of 66 more at the diagonal."""
    dense = [
        backward.step_clocks(parts(), kernel, "dense", 8192, causal=False)
        for kernel in (OURS, THEIRS)
    ]
    assert dense == [64 * 64 * (1536 + 2048), 64 * 64 * (1536 + 3072)]
    causal = [
        backward.step_clocks(parts(), kernel, "dense", 8192, causal=True)
        for kernel in (OURS, THEIRS)
    ]
    dq = 32 * 33 * 3072
    assert causal == [dq + 32 * 33 * 2 * 2048, dq + 64 * 65 // 2 * 3072]
    assert backward.step_clocks(parts()[:1], OURS, "dense", 8192, causal=False) is None
    assert backward.step_clocks([], THEIRS, "dense", 8192, causal=False) is None


def test_verdicts_of_the_backward():
    specialisations = [s for s in backward.BACKWARD if s.name in backward.SHORT]
    both = [*parts(), *parts(which="causal")]
    assert [v.passed for v in backward.verdicts(both, specialisations)] == [True] * 5
    slow = [*parts(2200.0), *parts(which="causal")]
    missed = [v.name for v in backward.verdicts(slow, specialisations) if not v.passed]
    assert [name.partition(":")[0] for name in missed] == ["dense", "dense step, 8192 tokens"]
    alone = backward.verdicts(parts()[:3], specialisations)
    assert [v.passed for v in alone] == [True, None, None, None, None]


def test_every_specialisation_of_the_backward_is_a_spec():
    from cute_attn.kernels.attention.spec import Hd256BackwardSpec

    specs = [Hd256BackwardSpec(**{**backward.PLAIN, **s.ours}) for s in backward.BACKWARD]
    assert len(set(specs)) == len(specs) == len({s.name for s in backward.BACKWARD})
    with_peer = {s.name for s in backward.BACKWARD if s.theirs is not None}
    assert all((s.theirs is None) == (s.beside in with_peer) for s in backward.BACKWARD)


def check_backward(specialisations, nvdisasm):
    """Our kernels do not spill, and their busiest units take at most 0.8 of the clocks of theirs.

    Their dQ kernel is bound by its MMAs and spills; their dK/dV kernel by shared memory.
    """
    ours = [x for s in specialisations for x in backward.our_programs(s).items()]
    try:
        theirs, missing = backward.their_programs(specialisations, CAPTURES)
    except ImportError as reason:
        pytest.skip(str(reason))
    assert missing == []
    found = [a for name, p in (*ours, *theirs) for a in backward.analyse_parts(p, name, nvdisasm)]
    assert all(a.tile.shapes_checked for a in found)
    verdicts = backward.verdicts(found, specialisations)
    assert [v for v in verdicts if v.passed is False] == []
    assert len([v for v in verdicts if v.passed]) > len(specialisations)
    for a in found:
        if a.program.kernel == OURS:
            continue
        clocks = a.tile.clocks
        busiest, of_the_design = {
            backward.DQ: ("mma", {"mma": 3072, "shared memory": 2560}),
            backward.DKDV: ("shared memory", {"mma": 2048, "shared memory": 3072}),
        }[a.part]
        assert clocks.order[0] == busiest
        for unit, least in of_the_design.items():  # and what the elementwise warps access
            assert least <= clocks.units[unit] <= 1.05 * least
        assert a.part != backward.DQ or a.tile.counted.local_accesses > 0


@pytest.mark.slow  # it compiles FlashAttention-4's backward
@pytest.mark.timeout(900)
def test_our_backward_takes_less_than_theirs(nvdisasm):
    check_backward([s for s in backward.BACKWARD if s.name == "dense"], nvdisasm)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_specialisation_of_our_backward_takes_less_than_theirs(nvdisasm):
    check_backward(backward.BACKWARD, nvdisasm)


# -- Hopper ---------------------------------------------------------------------------------------


def check_hopper(tmp_path, *arguments):
    """Both have the same products and exponentials for a score, and every instruction is in one
    column."""
    argv = ["sass", "sm90", *arguments, "--captures", str(CAPTURES), "--out", str(tmp_path)]
    assert main(argv) == 0
    report = json.loads(next(tmp_path.rglob("sass-sm90*.json")).read_text())
    for row in report["rows"]:
        assert sum(row[column] for column in sm90_tiles.COLUMNS) == row["instructions"]
        assert row["fixed_clocks"] > row["instructions"] > row["fp32"] >= row["scores"]
        if row["case"].startswith("backward"):
            assert row["exponentials"] == row["scores"] == row["conversions"]
    return {(row["case"], row["kernel"]): row for row in report["rows"]}


def test_instructions_of_our_backward_for_a_tile(nvdisasm, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "missing", lambda name: f"{name} is not installed")
    rows = check_hopper(tmp_path, "--short")
    (row,) = rows.values()
    assert (row["case"], row["kernel"]) == ("backward 128 dense", OURS)
    # 64 x 64 scores of a warpgroup, five products of 16-wide steps: 8 each for S, dP and dQ, 4 for
    # dV and dK.
    assert (row["scores"], row["mma"]) == (32, 32)


@pytest.mark.slow  # it compiles ten kernels of FlashAttention-4
@pytest.mark.timeout(900)
def test_instructions_of_both_for_a_tile(nvdisasm, tmp_path):
    if reason := peers.missing("flash_attention_4"):
        pytest.skip(reason)
    rows = check_hopper(tmp_path)
    assert set(rows) == {(c.name, kernel) for c in sm90_tiles.CASES for kernel in (OURS, THEIRS)}
    theirs = rows["backward 128 causal", THEIRS]
    assert (theirs["scores"], theirs["mma"]) == (32, 32)
