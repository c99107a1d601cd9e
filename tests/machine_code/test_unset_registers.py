"""Registers that machine code reads without having set them, in hand-written listings."""

import pytest

from cute_attn.machine_code.listing import functions
from cute_attn.machine_code.unset_registers import unset_reads


def unset(*lines: str) -> list[str]:
    """The registers that are found in a function of these instructions and labels."""
    text = ["\t.section\t.text.kernel"]
    address = 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text.append(f"        /*{address:04x}*/  {line} ;")
        address += 16
    (function,) = functions("\n".join(text))
    return [read.register for read in unset_reads(function)]


def test_what_is_set_is_no_finding():
    assert unset("S2R R0, SR_TID.X", "IADD3 R1, R0, 0x1, RZ", "EXIT") == []


def test_a_register_that_nothing_sets():
    assert unset("S2R R0, SR_TID.X", "IADD3 R1, R0, R2, RZ", "EXIT") == ["R2"]
    assert unset("UIADD3 UR4, UR5, 0x1, URZ", "EXIT") == ["UR5"]
    assert unset("STS [R3+UR4], R5", "EXIT") == ["R3", "UR4", "R5"]


def test_a_register_that_is_set_only_when_the_loop_goes_round():
    """The error of ptxas 13.4: in the first round, and after the loop, R5 is not the thread."""
    lost = ("LOP3.LUT R1, R5, 0x1f, RZ, 0xc0, !PT", "MUFU.EX2 R5, R1", "@P0 BRA `(.L_x_1)")
    code = ("S2R R0, SR_TID.X", ".L_x_1:", "S2R R2, SR_TID.X", *lost, "EXIT")
    assert unset(*code) == ["R5"]
    assert unset("S2R R5, SR_TID.X", *code) == []


def test_what_one_way_sets_is_set():
    """The other path reads the register only to discard it."""
    code = ("@P0 BRA `(.L_x_1)", "LDG.E R4, desc[UR4][R2.64]", ".L_x_1:", "SEL R5, R4, RZ, P0")
    assert unset("MOV R2, 0x0", "ULDC.64 UR4, c[0x0][0x208]", *code, "EXIT") == []
    assert unset("@P0 MOV R4, 0x1", "@P0 IADD3 R5, R4, 0x1, RZ", "EXIT") == []


def test_a_copy_passes_on_that_a_register_is_unset():
    assert unset("MOV R1, R2", "EXIT") == []
    assert unset("R2UR UR4, R2", "UMOV UR5, UR4", "IADD3 R0, UR5, 0x1, RZ", "EXIT") == ["UR5"]
    assert unset("MOV R1, 0x2", "IMAD.MOV.U32 R1, RZ, RZ, R2", "FADD R3, R1, 1", "EXIT") == ["R1"]


def test_flags_put_into_a_register_bit_by_bit():
    assert unset("LOP3.LUT R9, R9, 0xfffffffe, RZ, 0xc0, !PT", "EXIT") == []


@pytest.mark.parametrize(
    ("instruction", "last"),
    [
        ("LDS.128 R4, [RZ]", 7),
        ("LDS.64 R4, [RZ]", 5),
        ("LDS R4, [RZ]", 4),
        ("CS2R R4, SRZ", 5),
        ("CS2R.32 R4, SR_CLOCKLO", 4),
        ("IMAD.WIDE.U32 R4, RZ, RZ, RZ", 5),
        ("HMMA.16816.F32.BF16 R4, RZ, RZ, RZ", 7),
        ("HMMA.1688.F32.TF32 R4, RZ, RZ, RZ", 7),
        ("HMMA.16816.F16 R4, RZ, RZ, RZ", 5),
        ("LDSM.16.MT88.4 R4, [RZ]", 7),
        ("LDSM.16.M88 R4, [RZ]", 4),
        ("HGMMA.64x64x16.F32.BF16 R4, gdesc[UR4], RZ, !UPT", 35),
        ("SHFL.IDX PT, R4, RZ, RZ, 0x1f", 4),
        ("IADD3 R4, P0, RZ, 0x1, RZ", 4),
        ("LDTM.x8 R4, tmem[UR4]", 11),
    ],
)
def test_how_many_registers_an_instruction_sets(instruction: str, last: int):
    ready = ("ULDC.64 UR4, c[0x0][0x208]", "ULDC.64 UR6, c[0x0][0x208]")
    assert unset(*ready, instruction, f"FADD R0, R{last}, 1", "EXIT") == []
    assert unset(*ready, instruction, f"FADD R0, R{last + 1}, 1", "EXIT") == [f"R{last + 1}"]


@pytest.mark.parametrize(
    "instruction", ["STG.E desc[UR4][R2.64], R3", "ISETP.NE.AND P0, PT, R2, R3, PT", "R2P PR, R2"]
)
def test_instructions_that_set_no_register(instruction: str):
    found = unset("ULDC.64 UR4, c[0x0][0x208]", instruction, "FADD R0, R2, 1", "EXIT")
    assert found[-1] == "R2"
    assert len(found) >= 2
