"""Listings of nvdisasm, read into instructions, basic blocks and loops."""

import re
from pathlib import Path

import pytest

from cute_attn.machine_code.listing import Instruction, ListingError, functions

# `nvdisasm -c -hex` of a small kernel for sm_100a: a loop that waits for a barrier, masks the first
# three tiles behind a branch, and adds up exponentials.
TILES = (Path(__file__).parent / "tiles.sass.txt").read_text()


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
