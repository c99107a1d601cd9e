import json
import re
from pathlib import Path

import pytest

from cute_attn.bench import _sass_model as model
from cute_attn.bench import sass
from cute_attn.bench.__main__ import main
from cute_attn.bench._sass_listing import Instruction, ListingError, functions
from cute_attn.bench._sass_model import HD256_FORWARD, AnalysisError
from cute_attn.bench.registry import EXIT_UNAVAILABLE, Unavailable
from cute_attn.emulator import cubin

# `nvdisasm -c -hex` of a small kernel for sm_100a: a loop that waits for a barrier, masks the first
# three tiles behind a branch, and adds up exponentials.
TILES = (Path(__file__).parent / "sass_tiles.txt").read_text()
CAPTURES = Path(__file__).parents[2] / "build" / "peers"


@pytest.fixture
def tiles():
    (function,) = functions(TILES)
    return function


# -- the listing ----------------------------------------------------------------------------------


def test_instructions_are_read(tiles):
    assert tiles.name == "tiles"
    assert [i.address for i in tiles.instructions] == list(range(0, 0x300, 16))
    assert len(re.findall(r"^ +/\*[0-9a-f]{4}\*/", TILES, re.MULTILINE)) == len(tiles.instructions)
    fsel = next(i for i in tiles.instructions if i.opcode == "FSEL")
    assert (fsel.predicate, fsel.operands) == ("", "R4, R4, -INF , P0")
    branch = next(i for i in tiles.instructions if i.address == 0x170)
    assert (branch.predicate, branch.targets, branch.falls_through) == ("P0", (".L_x_2",), True)
    uniform = next(i for i in tiles.instructions if i.address == 0xB0)
    assert (uniform.base, uniform.targets, uniform.falls_through) == ("BRA", (".L_x_0",), True)
    last = next(i for i in tiles.instructions if i.address == 0x250)
    assert (last.targets, last.falls_through) == ((".L_x_4",), False)


def test_stall_counts_are_decoded(tiles):
    stall = {i.address: i.stall for i in tiles.instructions}
    assert stall[0x40] == 1  # an IMAD.MOV before something independent
    assert stall[0x1F0] == 12  # what a predicate takes to reach the branch
    assert all(count is not None and count < 16 for count in stall.values())
    bare = re.sub(r"/\* 0x[0-9a-f]+ \*/", "", TILES)
    assert {i.stall for i in functions(bare)[0].instructions} == {None}


def test_loops_are_found(tiles):
    loops = tiles.loops()
    # The wait's own loop, out of line, and the tiles'; not the one behind the code's end.
    assert [tiles.blocks[loop.header][0].address for loop in loops] == [0x230, 0xE0]
    assert loops[0].blocks < loops[1].blocks
    addresses = [i.address for i in tiles.within(loops[1])]
    assert min(addresses) == 0xE0
    assert 0x200 in addresses
    assert 0x210 not in addresses


def test_a_way_through_a_loop(tiles):
    loop = tiles.loops()[-1]

    def addresses(gain):
        return [i.address for b in tiles.path(loop, gain) for i in tiles.blocks[b]]

    shortest = addresses(lambda i: 0.0)
    assert shortest == [*range(0xE0, 0x180, 16), *range(0x1B0, 0x210, 16)]
    masked = addresses(lambda i: float(i.opcode == "FSEL"))
    assert masked == list(range(0xE0, 0x210, 16))
    assert 0x240 in addresses(lambda i: float(i.address == 0x240))  # an inner loop, once


def test_a_listing_of_something_else_is_refused():
    with pytest.raises(ListingError, match="no function"):
        functions("cuobjdump fatal   : ...")
    with pytest.raises(ListingError, match=r"\.L_x_9"):
        functions(TILES.replace("`(.L_x_3)", "`(.L_x_9)"))


def test_an_indirect_branch_has_its_table():
    branch = Instruction(0, "", "BRX", 'R4 -0xd60 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)')
    assert (branch.targets, branch.falls_through) == ((".L_x_1", ".L_x_2"), False)


@pytest.mark.parametrize(
    ("opcode", "width"),
    [("LDTM.x32", 32), ("STTM.x16", 16), ("LDS", 1), ("LDS.128", 4), ("STS.64", 2), ("LDS.U8", 1)],
)
def test_widths(opcode, width):
    assert Instruction(0, "", opcode, "").width == width


# -- kinds, roles, counts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("UTCHMMA.2CTA", "mma"),
        ("UTCBAR.2CTA.MULTICAST", "barrier"),
        ("MUFU.EX2", "mufu_ex2"),
        ("MUFU.TANH", "mufu_other"),
        ("FFMA2", "packed_fma"),
        ("FADD2.RM", "packed_add"),
        ("FADD", "fp32_other"),
        ("FMNMX3.NAN", "fp32_other"),
        ("F2FP.BF16.F32.PACK_AB", "convert"),
        ("IMAD.MOV.U32", "int_multiply"),
        ("R2UR", "move"),
        ("UISETP.NE.AND", "uniform"),
        ("LDCU.64", "uniform"),
        ("LDTM.x32", "tmem_load"),
        ("STTM.x16", "tmem_store"),
        ("STS", "shared"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "barrier"),
        ("UTMALDG.4D.2CTA", "tma"),
        ("STL", "local"),
        ("BRA.U", "control"),
        ("ISETP.GT.AND", "integer"),
        ("LEA", "integer"),
    ],
)
def test_kinds(opcode, kind):
    assert model.kind(Instruction(0, "", opcode, "")) == kind


WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4"
SCORE = "UTCHMMA.2CTA gdesc[UR8], gdesc[UR4], tmem[UR6], tmem[UR4], idesc[UR5], UPT"
OUTPUT = "UTCHMMA.2CTA tmem[UR8], gdesc[UR4], tmem[UR6], tmem[UR4], idesc[UR5], UPT"


def loop(label, *body):
    return [f"{label}:", *body, f"@P1 BRA `({label})"]


def kernel(roles):
    """The listing of a kernel that goes through the roles' loops one after the other."""
    lines = ['\t.section\t.text.made,"ax",@progbits']
    address = 0
    for role in roles:
        for text in role:
            if text.startswith(".L") and text.endswith(":"):
                lines.append(text)
                continue
            predicate, _, rest = text.rpartition("@P1 ") if text.startswith("@") else ("", "", text)
            del predicate
            prefix = "@P1" if text.startswith("@") else "   "
            lines.append(f"        /*{address:04x}*/  {prefix} {rest} ;")
            address += 16
    lines.append(f"        /*{address:04x}*/      EXIT ;")
    (function,) = functions("\n".join(lines))
    return function


def made(**changes):
    """A kernel with the roles of hd256-fwd, in as few instructions as can be."""
    softmax = [WAIT, *["LDTM.x32 R4, tmem[UR4]"] * 4, *["MUFU.EX2 R0, R1"] * 128]
    softmax += ["FFMA2 R0, R2, R4, R6"] * 64 + ["STTM.x32 tmem[UR4], R4"] * 2
    roles = {
        "load": loop(".L_load", WAIT, *["UTMALDG.4D.2CTA [UR8], [UR6], desc[URZ]"] * 6),
        "mma": loop(".L_mma", WAIT, *[SCORE] * 16, *[OUTPUT] * 8),
        "masked": loop(".L_masked", *softmax, *["FSEL R0, R0, -INF , P0"] * 128),
        "softmax": loop(".L_softmax", *softmax),
        "correction": loop(
            ".L_correction",
            WAIT,
            "LDS R0, [R1]",
            "@P1 BRA `(.L_done)",
            *loop(
                ".L_rescale",
                "LDTM.x32 R4, tmem[UR4]",
                *["FMUL2 R4, R4, R0"] * 16,
                "STTM.x32 tmem[UR4], R4",
            ),
            ".L_done:",
            "SYNCS.ARRIVE.TRANS64.RED.ART0 RZ, [UR4], R4",
        ),
        **changes,
    }
    return kernel(roles.values())


def test_roles_are_told_apart_and_counted():
    counted = model.count_kernel(made(), HD256_FORWARD)
    assert {role: c.instructions for role, c in counted.roles.items()} == {
        "load": 8,
        "mma": 26,
        "softmax": 200,  # the loop without a mask
        "correction": 5,
    }
    softmax = counted.roles["softmax"]
    assert (softmax.kinds["mufu_ex2"], softmax.kinds["packed_fma"]) == (128, 64)
    assert softmax.tmem_read == 128 * 32 * 4
    assert softmax.tmem_written == 64 * 32 * 4
    assert counted.roles["correction"].shared == 32 * 4
    assert counted.roles["correction"].tmem_read == 0
    assert counted.rescale.tmem_read == counted.rescale.tmem_written == 256 * 32 * 4
    assert counted.rescale.kinds["packed_mul"] == 128
    assert counted.rescale.instructions == 5 + 8 * 19
    assert counted.local_accesses == 0


def test_the_clocks_of_a_tile():
    counted = model.count_kernel(made(), HD256_FORWARD)
    units = model.clocks(counted, HD256_FORWARD).units
    # Two products of 128 x 128 x 256 in an SM of 8192 FLOP a clock.
    assert units["mma"] == 2 * 2 * 128 * 128 * 256 / 8192 == 2048
    assert units["mufu"] == 128 * 128 / 16  # an exponential for each element of S
    assert units["fp32"] == 128 * 128 / 128  # a multiplication for each
    assert units["issue"] == 200 + 5 + 26
    # K and V come in, S reads Q and K, O reads V: 64 + 96 + 32 KiB, and a factor for each row.
    assert units["shared memory"] == (64 + 96 + 32) * 1024 / 128 + 128 * 4 / 128
    assert units["tmem read"] == 128 * 128 * 4 / 228
    assert units["warp: softmax"] == 0  # no encodings, no stall counts
    assert model.clocks(counted, HD256_FORWARD).share_of_peak == 1
    rescaling = model.clocks(counted, HD256_FORWARD, rescale=1.0).units
    assert rescaling["tmem read"] == (128 + 256) * 128 * 4 / 228
    assert rescaling["tmem write"] == (64 + 256) * 128 * 4 / 114
    half = model.clocks(counted, HD256_FORWARD, rescale=0.5).units
    assert half["tmem read"] == (128 + 128) * 128 * 4 / 228


def test_the_bound_is_the_busiest_unit():
    slow = model.Clocks({"mma": 2048.0, "mufu": 4096.0, "issue": 100.0}, 2048.0)
    assert (slow.order[0], slow.bound, slow.share_of_peak) == ("mufu", 4096, 0.5)


def test_an_unrolled_loop_is_counted_by_tiles():
    counted = model.count_kernel(
        made(mma=loop(".L_mma", *([WAIT] + [SCORE] * 16 + [OUTPUT] * 8) * 2)), HD256_FORWARD
    )
    assert counted.roles["mma"].kinds["mma"] == 24
    assert counted.roles["mma"].instructions == 25.5


def test_a_mask_in_line_is_in_the_count():
    in_line = [WAIT, *["LDTM.x32 R4, tmem[UR4]"] * 4, *["MUFU.EX2 R0, R1"] * 128]
    masks = ["@P1 SEL R0, R1, R2, P2"] * 128
    plain = loop(".L_softmax", *in_line, "@P1 BRA `(.L_whole)", *masks, ".L_whole:", "NOP")
    always = loop(".L_softmax", *in_line, *masks, "NOP")
    counts = [
        model.count_kernel(made(masked=[], softmax=body), HD256_FORWARD).roles["softmax"]
        for body in (plain, always)
    ]
    assert [c.opcodes.get("SEL", 0) for c in counts] == [0, 128]


def test_what_is_not_understood_is_refused():
    with pytest.raises(AnalysisError, match="no loop of the role mma"):
        model.count_kernel(made(mma=[]), HD256_FORWARD)
    with pytest.raises(AnalysisError, match=r"role mma does 0\.\d+ tiles"):
        model.count_kernel(
            made(mma=loop(".L_mma", WAIT, *[SCORE] * 16, *[OUTPUT] * 7)), HD256_FORWARD
        )
    one_cta = OUTPUT.replace(".2CTA", "")
    with pytest.raises(AnalysisError, match="another kind"):
        model.count_kernel(made(mma=loop(".L_mma", WAIT, *[one_cta] * 24)), HD256_FORWARD)


def test_spills_are_seen_wherever_they_are():
    spilling = made(load=["STL [R1], R2", *loop(".L_load", WAIT, *["UTMALDG.4D R0"] * 6)])
    assert model.count_kernel(spilling, HD256_FORWARD).local_accesses == 1


SCORE_PTX = """
\tmov.b32 %r7, 270533776;
\ttcgen05.mma.cta_group::2.kind::f16.collector::a::discard [%r46], %rd23, %rd4, %r7, {%r1}, %p1;
"""
OUTPUT_PTX = """
\tmov.b32 idesc, 0x10410490;
\t@leader tcgen05.mma.cta_group::2.kind::f16 [acc], [tmem_a + 0x8], smem_desc_b, idesc, 1;
"""


def test_mma_shapes_are_checked_with_the_ptx():
    assert model.check_shapes(SCORE_PTX + OUTPUT_PTX, HD256_FORWARD)
    assert not model.check_shapes("", HD256_FORWARD)
    computed = SCORE_PTX.replace("mov.b32 %r7, 270533776", "or.b32 %r7, %r8, %r9")
    assert not model.check_shapes(computed + OUTPUT_PTX, HD256_FORWARD)
    with pytest.raises(AnalysisError, match=r"\(128, 128, 16\), not \(256, 128, 16\)"):
        model.check_shapes(SCORE_PTX.replace("270533776", "0x8200490"), HD256_FORWARD)
    with pytest.raises(AnalysisError, match=r"\(256, 128, 16\), not \(256, 256, 16\)"):
        model.check_shapes(OUTPUT_PTX.replace("0x10410490", "0x10200490"), HD256_FORWARD)


# -- the benchmark --------------------------------------------------------------------------------


def elf(machine, size):
    """The smallest ELF header that has an end: one table of sections of `size` bytes in all."""
    header = bytearray(b"\x7fELF" + bytes(60))
    header[18:20] = machine.to_bytes(2, "little")
    header[40:48] = (64).to_bytes(8, "little")
    header[58:60] = size.to_bytes(2, "little")
    header[60:62] = (1).to_bytes(2, "little")
    return bytes(header) + bytes(range(size))


def test_cubins_are_cut_out_of_an_object():
    code = elf(cubin.EM_CUDA, 32)
    assert cubin.cubins(elf(62, 8) + b"text" + code + b"more" + b"\x7fELF") == [code]


def test_nvdisasm_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("NVDISASM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    tool = tmp_path / "toolkit" / "bin" / "nvdisasm"
    tool.parent.mkdir(parents=True)
    tool.write_text("")
    assert sass.find_nvdisasm() == tool
    monkeypatch.setenv("NVDISASM", str(tool))
    assert sass.find_nvdisasm() == tool


def test_without_nvdisasm_it_says_what_to_install(monkeypatch, capsys):
    def none():
        raise Unavailable("needs nvdisasm, of ...")

    monkeypatch.setattr(sass, "find_nvdisasm", none)
    assert main(["sass", "hd256-fwd", "--print-only"]) == EXIT_UNAVAILABLE
    assert "needs nvdisasm" in capsys.readouterr().err


def program(kernel, specialisation, **facts):
    known = {"registers": 168, "stack": 0, "spilled": 0, "shared": 230000, **facts}
    return sass.Program(kernel, specialisation, b"", "", **known)


def analysed(kernel, specialisation, function=None, **facts):
    counted = model.count_kernel(function or made(), HD256_FORWARD)
    clocks = [model.clocks(counted, HD256_FORWARD, rescale=share) for share in (0.0, 1.0)]
    return sass.Analysed(program(kernel, specialisation, **facts), counted, *clocks, True)


def slow():
    """One whose softmax needs more than the MMAs' time for its exponentials."""
    body = [WAIT, *["LDTM.x32 R4, tmem[UR4]"] * 4, *["MUFU.EX2 R0, R1"] * 300]
    return made(masked=[], softmax=loop(".L_softmax", *body))


def passed(*found):
    short = [s for s in sass.FORWARD if s.name in sass.SHORT]
    return [v.passed for v in sass.verdicts(found, short)]


def test_verdicts():
    ours = [analysed(sass.OURS, name) for name in sass.SHORT]
    theirs = [analysed(sass.THEIRS, name, spilled=None) for name in sass.SHORT]
    assert passed(*ours, *theirs) == [True, True, True, True]
    assert passed(*ours) == [True, None, None, None]
    assert passed(ours[0], analysed(sass.OURS, "causal", slow()), *theirs)[:3] == [
        True,
        True,
        False,
    ]
    for facts in ({"spilled": 4}, {"spilled": None}, {"stack": 8}):
        assert passed(analysed(sass.OURS, "non-causal", **facts), ours[1], *theirs)[0] is False


def test_every_specialisation_is_a_spec():
    from cute_attn.kernels.attention.spec import Hd256ForwardSpec

    names = [s.name for s in sass.FORWARD]
    assert len(set(names)) == len(names)
    specs = [Hd256ForwardSpec(**{**sass._PLAIN_FORWARD, **s.ours}) for s in sass.FORWARD]
    assert len(set(specs)) == len(specs)
    with_peer = {s.name for s in sass.FORWARD if s.theirs is not None}
    assert all((s.theirs is None) == (s.beside in with_peer) for s in sass.FORWARD)


@pytest.fixture(scope="module")
def nvdisasm():
    pytest.importorskip("cutlass")
    try:
        return sass.find_nvdisasm()
    except Unavailable as reason:
        pytest.skip(str(reason))


def check(specialisations, nvdisasm):
    """No spills, and no unit that limits ours more than theirs."""
    programs = [sass.our_program(s) for s in specialisations]
    assert [(p.specialisation, p.spilled, p.stack) for p in programs] == [
        (s.name, 0, 0) for s in specialisations
    ]
    try:
        theirs, missing = sass.their_programs(specialisations, CAPTURES)
    except ImportError as reason:
        pytest.skip(str(reason))
    assert missing == []
    found = [sass.analyse(p, nvdisasm, HD256_FORWARD) for p in (*programs, *theirs)]
    assert all(a.shapes_checked for a in found)
    missed = [v for v in sass.verdicts(found, specialisations) if v.passed is not True]
    assert missed == []


@pytest.mark.timeout(900)
def test_ours_is_not_above_theirs_and_does_not_spill(nvdisasm):
    check([s for s in sass.FORWARD if s.name in sass.SHORT], nvdisasm)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_specialisation_is_above_theirs_or_spills(nvdisasm):
    check(sass.FORWARD, nvdisasm)


@pytest.mark.timeout(900)
def test_the_whole_benchmark(nvdisasm, tmp_path):
    argv = ["sass", "hd256-fwd", "--short", "--captures", str(CAPTURES), "--out", str(tmp_path)]
    assert main(argv) == 0
    report = json.loads(next(tmp_path.glob("sass-hd256-fwd-*.json")).read_text())
    ours = [row for row in report["rows"] if row["kernel"] == sass.OURS]
    assert [row["specialisation"] for row in ours] == list(sass.SHORT)
    text = next(tmp_path.glob("sass-hd256-fwd-*.md")).read_text()
    assert "nothing is measured" in text
