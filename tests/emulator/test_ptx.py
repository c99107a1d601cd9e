"""Parsing PTX, and the parts of lowering that need no engine."""

from __future__ import annotations

import ctypes
import math
import struct

import pytest

from cute_attn.emulator import lowering, operands, program, ptx, variables
from cute_attn.emulator.forms import Form, FormTable, UnsupportedInstruction

HEADER = ".version 8.8\n.target sm_90a, debug\n.address_size 64\n"

FORMS = [
    ("bra{.uni}", "L"),
    ("brx.idx", "s32 sxl"),
    ("exit", ""),
    ("ret{.uni}", ""),
    ("call{.uni}", "sxl? F sxl?"),
    ("mov.(b32|u32|f32)", "d32 s32"),
    ("mov.b64", "d64 s64"),
    ("mov.b64", "d64 s32l"),
    ("mov.b64", "d32l s64"),
    ("add{.rn}{.ftz}.f32", "d32 s32 s32"),
    ("add.rn.f32.(bf16|f16)", "d32 s32 s32"),
    ("add.(s32|u32|s16)", "d32 s32 s32"),
    ("add.f64", "d64 s64 s64"),
    ("mad.wide.s16", "d32 s32 s32 s32"),
    ("setp.lt.s32", "dpp s32 s32"),
    ("ld{.param|global|shared|local}{.v2|v4}.(b32|u32)", "d32l a"),
    ("ld.param.(b64|u64)", "d64 a"),
    ("st{.param|global|shared|local}.(b32|b64)", "a sx"),
    ("tma", "a T a"),
    ("wgmma.test", "d32l s32"),
]


def table() -> FormTable:
    return FormTable([Form(i, pattern, operands) for i, (pattern, operands) in enumerate(FORMS)])


def kernel(body: str, *, parameters: str = "", before: str = "") -> str:
    return f"{HEADER}{before}\n.visible .entry k({parameters})\n{{\n{body}\n}}\n"


def lowered(body: str, **parts: str) -> program.Program:
    return lowering.lower(ptx.parse(kernel(body, **parts)), table())


def packed_operands(result: program.Program, instruction: int) -> list[tuple[int, ...]]:
    """The packed operands: kind, bits, negated, base kind, count, place, number, immediate."""
    record = struct.unpack_from("<10i12h", result.records, 64 * instruction)
    unpack = struct.Struct("<BBBBiiiQ").unpack_from
    return [unpack(result.operands, 24 * (record[4] + i)) for i in range(record[5])]


def elements(result: program.Program, packed: tuple[int, ...]) -> list[tuple[int, ...]]:
    unpack = struct.Struct("<BBBBiiiQ").unpack_from
    return [unpack(result.operands, 24 * (packed[5] + i)) for i in range(packed[4])]


# ---- the parser


def test_header_and_kernel() -> None:
    text = (
        HEADER
        + """
        // .entry not_this ( .param .u32 x ) { }
        .file 1 "/src//kernel.py", 12345, 678
        .extern .shared .align 1024 .b8 dynamic[];
        .visible .entry first(
            .param .align 64 .b8 first_param_0[128],
            .param .u64 .ptr .global .align 16 first_param_1,
            .param .f32 first_param_2
        )
        .reqntid 384, 1, 1
        .minnctapersm 1
        .maxnreg 168
        .reqnctapercluster 2, 1, 1
        { /* nothing
             here */ ret; }
        .entry second() { ret; }
        """
    )
    module = ptx.parse(text)
    assert (module.version, module.target, module.arch) == ("8.8", "sm_90a", 90)
    assert module.files == {1: "/src//kernel.py"}
    assert [function.name for function in module.kernels] == ["first", "second"]
    first = module.kernel("first")
    assert first.directive("reqntid") == (384, 1, 1)
    assert first.directive("maxnreg") == (168,)
    assert first.directive("reqnctapercluster") == (2, 1, 1)
    sizes = [(p.name, p.alignment, p.bytes, p.pointer) for p in first.parameters]
    assert sizes == [
        ("first_param_0", 64, 128, False),
        ("first_param_1", 8, 8, True),
        ("first_param_2", 4, 4, False),
    ]
    assert module.variables["dynamic"].bytes == 0
    assert module.variables["dynamic"].alignment == 1024
    with pytest.raises(operands.PtxError, match="first, second"):
        module.kernel()


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("12", 12, "int"),
        ("-7", -7, "int"),
        ("0x1F", 31, "int"),
        ("0b101", 5, "int"),
        ("017", 15, "int"),
        ("0", 0, "int"),
        ("4294967295U", 4294967295, "int"),
        ("(1 << 4) | 3", 19, "int"),
        ("WARP_SZ", 32, "int"),
        ("0f3F800000", 1.0, "f32"),
        ("0FFF800000", -math.inf, "f32"),
        ("0d3FF8000000000000", 1.5, "f64"),
        ("1.25", 1.25, "f64"),
        ("-2.5e3", -2500.0, "f64"),
    ],
)
def test_constants(text: str, value: float, kind: str) -> None:
    found = operands.parse_operand(text)
    assert isinstance(found, operands.Immediate)
    assert (found.value, found.kind) == (value, kind)


def test_operands() -> None:
    address = operands.parse_operand("[%rd1+-16]")
    assert isinstance(address, operands.Address) and address.offset == -16
    assert isinstance(address.base, operands.Name) and address.base.name == "%rd1"
    absolute = operands.parse_operand("[ 0x40 ]")
    assert isinstance(absolute, operands.Address) and absolute.offset == 64
    tensor = operands.parse_operand("[%rd4+8, {%r1, 0, %r2}]")
    assert isinstance(tensor, operands.TensorAddress)
    assert tensor.address.offset == 8
    assert [element.text for element in tensor.coordinates.elements] == ["%r1", "0", "%r2"]
    pair = operands.parse_operand("_|%p1")
    assert isinstance(pair, operands.Pair) and isinstance(pair.first, operands.Sink)
    assert isinstance(operands.parse_operand("!%p1"), operands.Negated)
    arguments = operands.parse_operand("(param0, param1)")
    assert isinstance(arguments, operands.Vector) and len(arguments.elements) == 2
    with pytest.raises(operands.PtxError, match="cannot read the operand"):
        operands.parse_operand("%r1 %r2")


def test_splitting() -> None:
    text = "{%r1, %r2}, [%rd1, {%r3, %r4}], (a, b), 5"
    assert operands.split_operands(text) == ["{%r1, %r2}", "[%rd1, {%r3, %r4}]", "(a, b)", "5"]
    assert operands.split_operands("") == []


def test_statements_and_scopes() -> None:
    module = ptx.parse(
        kernel(
            """
            .reg .pred %p<3>; .reg .b32 %r<10>, outer;
            mov.b32 %r1, 5; mov.b32
                %r2,
                6;
            { .reg .pred P1;
              WAIT: @P1 bra.uni DONE; bra WAIT; DONE: }
            { .reg .pred P1; .reg .b32 slot_<4>;
              WAIT: @!P1 bra WAIT; mov.b32 slot_3, outer; }
            .pragma "nounroll";
            ret;
            """
        )
    )
    code = module.kernel().instructions
    assert [i.opcode for i in code] == [
        "mov.b32",
        "mov.b32",
        "bra.uni",
        "bra",
        "bra",
        "mov.b32",
        "ret",
    ]
    assert module.line_text(code[1].line).startswith("mov.b32 %r1, 5; mov.b32")
    assert (code[2].guard, code[2].guard_negated) == ("P1", False)
    assert (code[4].guard, code[4].guard_negated) == ("P1", True)
    assert code[2].scope.labels == {"WAIT": 2, "DONE": 4}
    assert code[4].scope.labels == {"WAIT": 4}
    assert code[5].scope.find_register("slot_3") is not None
    assert code[5].scope.find_register("slot_4") is None
    assert code[0].scope.find_register("%r9") is not None
    assert code[0].scope.find_register("%r10") is None


def test_line_information() -> None:
    module = ptx.parse(
        kernel(
            """
            .loc 1 40 2
            mov.b32 %r1, 1;
            .loc 2 7 1, function_name $L__info_string0, inlined_at 1 41 9
            mov.b32 %r1, 2;
            """
        )
        + """
        .file 1 "kernel.py"
        .file 2 "helpers.py"
        .section .debug_str
        {
        $L__info_string0:
        .b8 102,109,97,120
        .b8 0
        }
        """
    )
    first, second = module.kernel().instructions
    assert module.source(first.location) == "kernel.py:40"
    assert module.source(second.location) == "helpers.py:7"
    assert second.location is not None and second.location.function == "fmax"
    assert module.source(second.location.inlined_at) == "kernel.py:41"


def test_declarations() -> None:
    module = ptx.parse(
        HEADER
        + """
        .global .align 8 .b8 text[] = "a;b\\n";
        .const .align 4 .f32 table[4] = {1.0, 0f40000000, -3.5};
        .global .u64 pointer[2] = {generic(text)+1, text};
        .global .v4 .u32 quad;
        .shared .align 16 .b8 tile[64], other[8];
        .extern .func (.param .b32 result) vprintf (.param .b64 a, .param .b64 b);
        """
    )
    assert module.variables["text"].bytes == 5
    assert module.variables["quad"].bytes == 16
    assert module.variables["other"].bytes == 8
    assert module.functions["vprintf"].scope is None
    memory = variables.ModuleMemory(module)
    text = memory.address("text")
    constants = memory.address("table")
    pointer = memory.address("pointer")
    assert text is not None and constants is not None and pointer is not None
    assert ctypes.string_at(text, 5) == b"a;b\n\0"
    assert struct.unpack("<4f", ctypes.string_at(constants, 16)) == (1.0, 2.0, -3.5, 0.0)
    assert struct.unpack("<2Q", ctypes.string_at(pointer, 16)) == (text + 1, text)
    assert {name: writable for _, _, name, writable in memory.regions()} == {
        "text": True,
        "table": False,
        "pointer": True,
        "quad": True,
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.b32 %r1, 1", "no semicolon|cannot read"),
        ("A: ret; A: ret;", "occurs twice"),
        (".reg .b99 x;", "b99"),
        (".surprise 1;", "surprise"),
    ],
)
def test_errors_name_the_line(body: str, message: str) -> None:
    with pytest.raises(operands.PtxError, match=rf"PTX line \d+.*({message})"):
        ptx.parse(kernel(body))


# ---- lowering


def test_registers_and_constants() -> None:
    result = lowered(
        """
        .reg .b16 %rs<4>; .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .f64 %fd<4>; .reg .pred %p<4>;
        mov.u32 %r1, %tid.x;
        add.s32 %r2, %r1, -1;
        add.s16 %rs1, %rs1, -1;
        add.f32 %r3, %r1, 1.5;
        add.f64 %fd1, %fd1, 0f3F800000;
        add.rn.f32.bf16 %r3, %rs1, 0f3F800000;
        mad.wide.s16 %r3, %rs1, -1, -1;
        setp.lt.s32 %p1|%p2, %r1, 4;
        setp.lt.s32 %p1, %r1, 4;
        @!%p1 mov.b64 {%r1, _}, %rd1;
        """
    )
    special = packed_operands(result, 0)[1]
    assert special[0] == program.K_SREG
    assert program.SPECIAL_REGISTERS[special[5]] == "%tid.x"
    assert packed_operands(result, 1)[2][7] == 2**64 - 1
    assert packed_operands(result, 2)[2][7] == 0xFFFF  # values of 16 bits are extended by zeros
    assert packed_operands(result, 3)[2][7] == 0x3FC00000
    assert packed_operands(result, 4)[2][7] == 0x3F800000  # the bits as they are, as ptxas has it
    assert packed_operands(result, 5)[2][7] == 0x3F800000  # the addend is f32, not bf16
    assert [o[7] for o in packed_operands(result, 6)[2:]] == [0xFFFF, 2**64 - 1]
    assert [o[0] for o in packed_operands(result, 7)] == [program.K_PRED] * 2 + [
        program.K_REG,
        program.K_IMM,
    ]
    assert packed_operands(result, 8)[1][0] == program.K_NONE
    unpacked = packed_operands(result, 9)[0]
    assert unpacked[0] == program.K_LIST
    assert [e[0] for e in elements(result, unpacked)] == [program.K_REG, program.K_NONE]
    guard = struct.unpack_from("<10i", result.records, 64 * 9)[1:4]
    assert guard[2] == 1 and result.register_names[guard[1]] == "%p1"
    assert result.opcode(len(result.instructions) - 1) == "exit"  # appended


def test_labels_in_scopes() -> None:
    result = lowered(
        """
        .reg .pred %p<2>; .reg .b32 %r<3>;
        L: { .reg .pred %p1; L: @%p1 bra L; bra OUT; }
        bra L;
        targets: .branchtargets L, OUT;
        brx.idx %r1, targets;
        OUT: ret;
        """
    )
    assert packed_operands(result, 0)[0][7] == 0
    assert packed_operands(result, 1)[0][7] == 4
    assert packed_operands(result, 2)[0][7] == 0
    assert [e[7] for e in elements(result, packed_operands(result, 3)[1])] == [0, 4]


def test_symbols_and_memory_layout() -> None:
    result = lowered(
        """
        .reg .b32 %r<4>; .reg .b64 %rd<4>;
        .local .align 8 .b8 depot[24];
        .shared .align 32 .b8 mine[8];
        mov.u32 %r1, tile;
        mov.u32 %r1, dynamic+4;
        mov.b64 %rd1, depot+8;
        mov.b64 %rd1, b;
        ld.param.u64 %rd1, [b+0];
        st.shared.b32 [tile+4], %r1;
        st.shared.b32 [mine], %r1;
        ld.shared.u32 %r1, [%r1+-4];
        mov.b64 %rd1, variable;
        """,
        parameters=".param .u32 a, .param .align 16 .b8 b[32]",
        before=""".shared .align 4 .b8 tile[20];
        .shared .b8 unused[4096];
        .extern .shared .align 128 .b8 dynamic[];
        .global .u32 variable = 7;""",
    )
    assert result.shared == {"tile": 0, "mine": 32, "dynamic": 128}
    assert result.static_shared == 128
    assert [(p.name, p.offset, p.bytes) for p in result.parameters] == [("a", 0, 4), ("b", 16, 32)]
    kinds = [
        program.K_SHARED_SYM,
        program.K_SHARED_SYM,
        program.K_LOCAL_SYM,
        program.K_PARAM_SYM,
    ]
    sources = [packed_operands(result, i)[1] for i in range(4)]
    assert [source[0] for source in sources] == kinds
    assert [source[7] for source in sources] == [0, 132, 8, 16]
    assert packed_operands(result, 4)[1][3] == program.K_PARAM_SYM
    assert packed_operands(result, 5)[0][3] == program.K_SHARED_SYM
    assert packed_operands(result, 5)[0][7] == 4
    assert packed_operands(result, 7)[1][7] == 2**64 - 4
    address = packed_operands(result, 8)[1]
    assert address[0] == program.K_IMM
    assert ctypes.c_uint32.from_address(address[7]).value == 7
    assert result.header[2] == 32  # local bytes, in units of 16


def test_vector_registers() -> None:
    result = lowered(
        """
        .reg .v4 .b32 quad; .reg .b32 %r<2>;
        mov.b32 quad.y, %r1;
        ld.shared.v4.u32 quad, [%r1];
        """
    )
    names = [result.register_names[e[6]] for e in elements(result, packed_operands(result, 1)[0])]
    assert names == ["quad.x", "quad.y", "quad.z", "quad.w"]
    assert result.register_names[packed_operands(result, 0)[0][6]] == "quad.y"


def test_pairs_and_tensor_addresses_take_two_entries() -> None:
    result = lowered(".reg .b32 %r<4>; .reg .b64 %rd<2>; tma [%r1], [%rd1, {%r2, 3}], [%r1+8];")
    packed = packed_operands(result, 0)
    assert [o[0] for o in packed] == [
        program.K_ADDRESS,
        program.K_ADDRESS,
        program.K_LIST,
        program.K_ADDRESS,
    ]
    assert [e[0] for e in elements(result, packed[2])] == [program.K_REG, program.K_IMM]


def test_calls() -> None:
    result = lowered(
        """
        .reg .b32 %r<4>; .reg .b64 %rd<2>;
        { // callseq 0, 0
        .param .b64 param0;
        st.param.b64 [param0+0], %rd1;
        .param .b64 param1;
        .param .b32 retval0;
        call.uni (retval0), vprintf, (param0, param1);
        ld.param.b32 %r1, [retval0+0];
        } // callseq 0
        """,
        before=".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);",
    )
    returned, function, arguments = packed_operands(result, 1)
    assert result.strings[function[7]] == "vprintf"
    assert [e[0] for e in elements(result, arguments)] == [program.K_LOCAL_SYM] * 2
    assert [e[7] for e in elements(result, arguments)] == [0, 8]
    assert [e[7] for e in elements(result, returned)] == [16]
    assert packed_operands(result, 0)[0][3] == program.K_LOCAL_SYM


FUNCTION = """
.func (.param .b32 out) increment (.param .b32 in)
{
    .reg .b32 %r<3>; .reg .pred %p<2>;
    ld.param.b32 %r1, [in];
    add.s32 %r2, %r1, 1;
    st.param.b32 [out], %r2;
    @%p1 ret;
    bra L;
    L: ret;
}
"""


def test_device_functions_are_inlined() -> None:
    call = """{ .param .b32 a; .param .b32 b; st.param.b32 [a], %r1;
              call.uni (b), increment, (a); ld.param.b32 %r1, [b]; }"""
    result = lowered(
        f".reg .b32 %r<2>; mov.b32 %r1, 0; {call} {call} ret;",
        before=FUNCTION,
    )
    opcodes = [result.opcode(i) for i in range(len(result.instructions))]
    inlined = ["st.param.b32", "ld.param.b32", "add.s32", "st.param.b32", "bra", "bra", "bra"]
    assert opcodes == ["mov.b32", *[*inlined, "ld.param.b32"] * 2, "ret"]
    assert [packed_operands(result, i)[0][7] for i in (5, 6, 7)] == [8, 7, 8]
    assert [packed_operands(result, i)[0][7] for i in (13, 14, 15)] == [16, 15, 16]
    assert packed_operands(result, 2)[1][7] == packed_operands(result, 1)[0][7]  # `in` is `a`
    first, second = packed_operands(result, 3)[0], packed_operands(result, 11)[0]
    assert first[6] != second[6]  # each call has registers of its own
    with pytest.raises(UnsupportedInstruction, match="recursive"):
        lowered("call f;", before=".func f() { call f; ret; }")


def test_short_lived_registers_share_places() -> None:
    chain = "".join(f"add.s32 %r{i + 1}, %r{i}, 1;\n" for i in range(1, 40))
    result = lowered(f".reg .b32 %r<50>; mov.b32 %r1, 0; {chain}")
    assert result.header[0] == 40  # each keeps a number of its own
    assert result.header[1] <= 3 * 32
    places = [packed_operands(result, i)[0][5] for i in range(1, 40)]
    sources = [packed_operands(result, i)[1][5] for i in range(1, 40)]
    # never that of a source of the same instruction
    assert all(place != source for place, source in zip(places, sources, strict=True))


@pytest.mark.parametrize(
    "body",
    [
        # written under a guard: a lane may read what it has not written
        "@%p1 mov.b32 %r1, 0; mov.b32 %r2, %r1; mov.b32 %r3, 0; mov.b32 %r4, %r3;",
        # alive across a label
        "mov.b32 %r1, 0; L: mov.b32 %r2, %r1; mov.b32 %r3, %r1;",
        # read before it is written
        "mov.b32 %r2, %r1; mov.b32 %r1, 0; mov.b32 %r3, 0;",
        # written by an asynchronous instruction
        "wgmma.test {%r1}, 0; mov.b32 %r2, %r1; mov.b32 %r3, 0;",
    ],
)
def test_other_registers_keep_places_of_their_own(body: str) -> None:
    result = lowered(f".reg .pred %p<2>; .reg .b32 %r<9>; {body}")
    places: dict[str, int] = {}
    for i in range(len(result.instructions)):
        for packed in packed_operands(result, i):
            for o in elements(result, packed) if packed[0] == program.K_LIST else [packed]:
                if o[0] == program.K_REG:
                    places[result.register_names[o[6]]] = o[5]
    own = places.pop("%r1")
    assert own not in places.values()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.b32 %r7, 1;", r"no register '%r7' is declared"),
        ("mov.b32 %r1, nowhere;", "'nowhere' is not declared"),
        ("mov.b32 %r1, %envreg3;", "%envreg3"),
        ("@%r1 mov.b32 %r1, 1;", "not a predicate"),
        ("bra %r1;", "unsupported operands"),
        ("ld.shared.u32 %r1, [%p1];", "no address"),
        ("fly.b32 %r1, 1;", r"unsupported instruction: 'fly.b32'.*PTX line.*fly.b32 %r1, 1"),
    ],
)
def test_errors_of_lowering(body: str, message: str) -> None:
    with pytest.raises(operands.PtxError, match=message):
        lowered(f".reg .pred %p<2>; .reg .b32 %r<4>;\n{body}")
