"""What a K/V tile costs, counted in kernels made for the purpose."""

import pytest

from cute_attn.machine_code import tile_model as model
from cute_attn.machine_code.listing import Instruction
from cute_attn.machine_code.tile_model import (
    HD256_FORWARD,
    AnalysisError,
    Geometry,
    Product,
    Role,
)
from tests.machine_code.made import OUTPUT, SCORE, WAIT, loop, made

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


def test_a_descriptor_chosen_by_a_predicate_has_one_shape():
    """Bits 13 and 14 negate an operand, which some compilers leave to a run-time argument."""
    chosen = SCORE_PTX.replace(
        "mov.b32 %r7, 270533776;",
        "selp.b32 %r5, 270541968, 270533776, %p9;\n\tselp.b32 %r6, 16384, 0, %p10;\n"
        "\tor.b32 %r7, %r5, %r6;",
    )
    assert model.check_shapes(chosen + OUTPUT_PTX, HD256_FORWARD)
    shapes = chosen.replace("270541968", "0x8200490")
    assert not model.check_shapes(shapes + OUTPUT_PTX, HD256_FORWARD)
    with pytest.raises(AnalysisError, match="not"):
        model.check_shapes(shapes.replace("270533776", "0x8202490") + OUTPUT_PTX, HD256_FORWARD)


# -- other kernels --------------------------------------------------------------------------------

PARTS = Geometry(
    tile=(256, 128),
    cluster=2,
    head_dim=256,
    ctas=2,
    products=(Product((256, 128, 16), 32), Product((256, 256, 16), 8, a_in_tmem=True)),
    loads=6,
    filled_bytes=1024,
    roles={
        "mma": model.MMA,
        "softmax": Role(8, model.exponentiates, columns=128, broadcast=8),
    },
)


def test_what_products_cost():
    """A and B from shared memory, half of each in each CTA; or B only."""
    score, output = PARTS.products
    assert score.flop(2) == 2 * 2 * 128 * 128 * 256
    assert score.operand_bytes(2) == 2 * 2 * (128 + 64) * 256
    assert output.operand_bytes(2) == 2 * 128 * 128
    assert (PARTS.mmas(a_in_tmem=False), PARTS.mmas(a_in_tmem=True)) == (32, 8)


def test_tiles_that_have_a_visible_pair():
    for tile in ((256, 128), (128, 256), (128, 128)):
        geometry = Geometry(tile, 2, 256, 2, (), 1, 0, {})
        for seqlen in (1, 128, 300, 1024):
            seen = {
                (i // tile[0], j // tile[1])
                for i in range(seqlen)
                for j in range(0, i + 1, 64 if i % 64 else 1)
            }
            assert geometry.tiles(seqlen, causal=True) == len(seen)
            every = -(-seqlen // tile[0]) * -(-seqlen // tile[1])
            assert geometry.tiles(seqlen, causal=False) == every
    assert PARTS.squares == 2
    assert Geometry((128, 256), 4, 256, 2, (), 1, 0, {}).squares == 1


def test_a_loop_over_parts_of_a_product_runs_as_often_as_its_work_says():
    inner = loop(".L_part", *[SCORE] * 8)
    body = loop(".L_mma", WAIT, *inner, "NOP", *[OUTPUT] * 8)
    counted = model.count_kernel(made(mma=body), PARTS)
    assert counted.roles["mma"].kinds["mma"] == 4 * 8 + 8
    assert counted.roles["mma"].instructions == 1 + 4 * 9 + 1 + 8 + 1
    with pytest.raises(AnalysisError, match=r"role mma does 0\.\d+ tiles"):
        model.count_kernel(made(mma=loop(".L_mma", WAIT, *inner, *[OUTPUT] * 7)), PARTS)


def test_loads_of_the_same_words_by_all_lanes():
    body = [WAIT, *["LDTM.x32 R4, tmem[UR4]"] * 4, *["MUFU.EX2 R0, R1"] * 32]
    body += ["LDS.128 R4, [R1]"] * 3 + ["@!PT LDS RZ, [RZ]"] * 5
    counted = model.count_kernel(
        made(masked=[], mma=loop(".L_mma", WAIT, *[SCORE] * 32, *[OUTPUT] * 8),
             softmax=loop(".L_softmax", *body)), PARTS,
    )  # fmt: skip
    # Two loads take 128 bytes, the third one 512; the others are never carried out.
    assert counted.roles["softmax"].shared == 2 * 128 + 512
    units = model.clocks(counted, PARTS).units
    operands = 2 * 2 * (128 + 64) * 256 + 2 * 128 * 128
    assert units["shared memory"] == (operands + 1024 + 8 * 768) / 128
    assert units["issue"] == 2 * counted.roles["softmax"].instructions + 42


def test_a_tile_in_the_middle_loads_less_than_the_first_one():
    """Which also loads an operand that stays, behind a branch."""
    load = "UTMALDG.4D.2CTA [UR8], [UR6], desc[URZ]"
    first = ["@P1 BRA `(.L_more)", *[load] * 4, "NOP", ".L_more:"]
    body = loop(".L_load", WAIT, *[load] * 2, *first, *[load] * 4)
    counted = model.count_kernel(made(load=body), HD256_FORWARD)
    assert counted.roles["load"].kinds["tma"] == 6
    assert counted.roles["load"].instructions == 1 + 2 + 1 + 4 + 1
    with pytest.raises(AnalysisError, match=r"role load does 0\.5 tiles"):
        model.count_kernel(made(load=loop(".L_load", WAIT, *[load] * 3)), HD256_FORWARD)
