"""Matching opcodes and operands to forms."""

from __future__ import annotations

import pytest

from cute_attn.emulator.forms import (
    Form,
    FormTable,
    UnsupportedInstruction,
    parse_signature,
)


def table(*forms: tuple[str, str]) -> FormTable:
    return FormTable([Form(i, pattern, operands) for i, (pattern, operands) in enumerate(forms)])


def modifiers(pattern: str, opcode: str) -> tuple[int, ...] | None:
    matches = table((pattern, "")).matches(opcode)
    return matches[0].modifiers if matches else None


def chosen(forms: FormTable, opcode: str, *shapes: str) -> tuple[int, tuple[int, ...]]:
    plan = forms.plan(opcode, shapes)
    return plan.match.form.index, plan.sources


@pytest.mark.parametrize(
    ("pattern", "opcode", "expected"),
    [
        ("add{.rn|rz|rm|rp}{.ftz}{.sat}.f32", "add.f32", (0, 0, 0)),
        ("add{.rn|rz|rm|rp}{.ftz}{.sat}.f32", "add.rm.sat.f32", (3, 0, 1)),
        ("add{.rn|rz|rm|rp}{.ftz}{.sat}.f32", "add.rn.ftz.f32", (1, 1, 0)),
        ("add{.rn|rz|rm|rp}{.ftz}{.sat}.f32", "add.f64", None),
        ("add{.rn|.rz}.f32", "add.rz.f32", (2,)),  # dots may be repeated
        ("ld{.shared|shared::cta}.b32", "ld.shared::cta.b32", (2,)),
        ("mma.m64n#k16.(f32|f16)", "mma.m64n128k16.f16", (128, 2)),
        ("mma.m64n#k16.(f32|f16)", "mma.m64nxk16.f16", None),
        ("copy{.L2::#B}.b32", "copy.L2::128B.b32", (1, 128)),
        ("copy{.L2::#B}.b32", "copy.b32", (0, 0)),
        ("wait::(ld|st).sync", "wait::st.sync", (2,)),
        ("(and|or|xor).b32", "or.b32", (2,)),
        ("red.add{.noftz{.x|y}}.f16", "red.add.noftz.y.f16", (1, 2)),
        ("red.add{.noftz{.x|y}}.f16", "red.add.f16", (0, 0)),
        ("fence.proxy.async{.global|shared::(cta|cluster)}", "fence.proxy.async", (0, 0)),
        (
            "fence.proxy.async{.global|shared::(cta|cluster)}",
            "fence.proxy.async.shared::cluster",
            (2, 2),
        ),
    ],
)
def test_patterns(pattern: str, opcode: str, expected: tuple[int, ...] | None) -> None:
    assert modifiers(pattern, opcode) == expected


def test_modifiers_may_stand_in_another_order() -> None:
    arrive = "mbarrier.arrive{.release|relaxed}{.cta|cluster}{.shared}.b64"
    assert modifiers(arrive, "mbarrier.arrive.shared.cluster.release.b64") == (1, 2, 1)
    # but not types, layouts and state spaces among themselves
    assert modifiers("cvt.(f32|s32).(f32|s32)", "cvt.f32.s32") == (1, 2)
    assert modifiers("cvt.f32.s32", "cvt.s32.f32") is None
    assert modifiers("mma.row.col.f32", "mma.col.row.f32") is None
    assert modifiers("copy.shared::cta.global", "copy.global.shared::cta") is None


@pytest.mark.parametrize("pattern", ["add{.rn", "add.rn}", "add|b", "mma.(a|b", "{.a}.b"])
def test_malformed_patterns(pattern: str) -> None:
    with pytest.raises(ValueError, match="malformed"):
        table((pattern, ""))


@pytest.mark.parametrize("signature", ["d16", "s", "x32", "d32lx", "A"])
def test_malformed_signatures(signature: str) -> None:
    with pytest.raises(ValueError, match="malformed"):
        parse_signature(signature)


def test_too_many_modifiers() -> None:
    with pytest.raises(ValueError, match="more than 12"):
        table(("add" + "{.x}" * 13, ""))


def test_choice_by_operands() -> None:
    forms = table(
        ("mov.b64", "d64 s64"),
        ("mov.b64", "d64 s32l"),
        ("mov.b64", "d32l s64"),
        ("mov.b64", "d128 s64l"),
    )
    assert chosen(forms, "mov.b64", "d", "d")[0] == 0
    assert chosen(forms, "mov.b64", "d", "i")[0] == 0
    assert chosen(forms, "mov.b64", "d", "{ww}")[0] == 1
    assert chosen(forms, "mov.b64", "{w_}", "d")[0] == 2
    assert chosen(forms, "mov.b64", "q", "{dd}")[0] == 3
    with pytest.raises(UnsupportedInstruction, match=r"unsupported operands of 'mov\.b64'"):
        forms.plan("mov.b64", ("w", "q"))


def test_widths() -> None:
    forms = table(("ld.b32", "d32 a"), ("add.b32", "d32 s32 s32"), ("add.b64", "d64 s64 s64"))
    assert chosen(forms, "ld.b32", "d", "a")[0] == 0  # a destination may be wider
    assert chosen(forms, "add.b64", "d", "w", "i")[0] == 2  # a source may be narrower
    with pytest.raises(UnsupportedInstruction):
        forms.plan("add.b32", ("w", "d", "w"))  # but not wider
    with pytest.raises(UnsupportedInstruction):
        forms.plan("add.b32", ("w", "p", "w"))


def test_optional_operands() -> None:
    forms = table(
        ("copy.b32", "a a i? s32? s64?"),
        ("setp.lt", "dpp s32 s32 sp?"),
        ("shfl.b32", "d32p s32"),
        ("wait", "a? s32?"),
    )
    assert chosen(forms, "copy.b32", "a", "a")[1] == (0, 1, -1, -1, -1)
    assert chosen(forms, "copy.b32", "a", "a", "i", "d")[1] == (0, 1, 2, -1, 3)
    assert chosen(forms, "copy.b32", "a", "a", "w")[1] == (0, 1, -1, 2, -1)
    assert chosen(forms, "setp.lt", "p|p", "w", "i", "!")[1] == (0, 1, 2, 3)
    assert chosen(forms, "setp.lt", "_|p", "w", "i")[1] == (0, 1, 2, -1)
    assert chosen(forms, "setp.lt", "p", "w", "i")[1] == (0, 1, 2, -1)
    assert chosen(forms, "shfl.b32", "w|p", "w")[1] == (0, 1)
    assert chosen(forms, "wait")[1] == (-1, -1)
    with pytest.raises(UnsupportedInstruction):
        forms.plan("copy.b32", ("a",))


def test_the_error_names_what_is_known() -> None:
    forms = table(*((f"add{{.rn}}.{kind}", "") for kind in ("f32", "f64")), ("sub.f32", ""))
    with pytest.raises(
        UnsupportedInstruction,
        match=r"unsupported instruction: 'add.foo.f32'; known forms of add: add\{.rn\}.f32 ",
    ):
        forms.plan("add.foo.f32", ())
    with pytest.raises(UnsupportedInstruction, match="no form of 'fly' is known"):
        forms.plan("fly.f32", ())
    many = table(*((f"op.m{n}", "") for n in range(20)))
    with pytest.raises(UnsupportedInstruction, match="and 12 more"):
        many.plan("op.q5", ())
