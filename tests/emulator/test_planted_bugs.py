"""Bugs planted in kernels that work, one at a time: each must be reported, and under its own name.

A bug is an edit of the PTX text. Every schedule and seed must report one of its checks at one of its
lines: the finding's own or the one it refers to, or, of a deadlock, one that its message names. The
kernels as they are must be clean on all of them, and give the same results.

Some bugs can show in more than one way, by the order in which things happen: a missing wait is a
race, or a read of what is not there yet. Such a bug has several checks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from cute_attn.emulator.machine import Run
from cute_attn.emulator.runner import Buffer, run_ptx
from tests.sweeps import slow_but

from . import planted_kernels as small
from .mutations import (
    COMMIT_MMA,
    EXPECT,
    LOAD,
    LOOP,
    MMA,
    MORE_SEEDS,
    PEEK,
    RELEASE,
    SEEDS,
    STARVING_SEEDS,
    STMATRIX,
    STORE,
    TMEM_LOAD,
    TMEM_STORE,
    TRY,
    Bug,
    Planted,
    Prepared,
    Ptx,
    Recorded,
    address,
    launch_recorded,
    name_of,
    operand,
    record,
    record_capture,
    reported,
)
from .peer_captures import PEERS, QUICK_PEERS, QUICK_REQUESTS, capture

# -- kernels --------------------------------------------------------------------------------------


def launch_small(kernel: small.Small) -> Prepared:
    """Prepares a text in place of the kernel's; then runs it by schedule and seed, and tells
    whether the result is right."""

    def prepare(text: str | None) -> Callable[[int, int], tuple[Run, bool]]:
        def run(schedule: int, seed: int) -> tuple[Run, bool]:
            arguments = kernel.arguments()
            done = run_ptx(
                text or kernel.text,
                grid=kernel.grid,
                block=kernel.block,
                args=arguments,
                dynamic_shared=kernel.dynamic_shared,
                schedule=schedule,
                seed=seed,
            )
            out = arguments[-1].array if isinstance(arguments[-1], Buffer) else arguments[-1]
            return done, np.array_equal(out, kernel.expected)

        return run

    return prepare


SMALL = {
    name: kernel for name, kernel in sorted(vars(small).items()) if isinstance(kernel, small.Small)
}

LIGHTNING = {
    "lightning bulk": ("sm_90a", "bulk", "bulk"),
    "lightning vector": ("sm_100a", "bulk", "vector"),
    "lightning cp.async": ("sm_80", "cp_async", "vector"),
    "lightning registers": ("sm_90a", None, None),
}


def record_peer(name: str) -> Recorded:
    request, launch = PEERS[name]
    return list(record_capture(capture(request, QUICK_REQUESTS)))[launch]


def record_lightning(arch: str, load: str | None, write_back: str | None) -> Recorded:
    from cute_attn import cache
    from cute_attn.kernels.lightning.spec import DecodeSpec, PipelinedDecodeSpec
    from cute_attn.kernels.lightning.table import DECODE, DECODE_PIPELINED

    fields: dict[str, Any] = {
        "dtype": "bfloat16",
        "state_dtype": "float32",
        "head_dim_k": 64,
        "head_dim_v": 64,
        "state_layout": "vk",
        "multi_token": False,
        "indexed": False,
        "replay": False,
        "aligned": True,
        "tile_v": 4 if load else 32,
        "num_warps": 2,
        "lanes_per_row": 16,
        "hints": "none",
    }
    kernel, spec = DECODE, DecodeSpec
    if load is not None:
        kernel, spec = DECODE_PIPELINED, PipelinedDecodeSpec
        fields |= {"num_stages": 2, "load": load, "write_back": write_back}
    entry = cache.compile(kernel, spec(**fields), arch=arch)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 64, generator=generator).to(torch.bfloat16)
    state = torch.randn(1, 1, 64, 64, generator=generator)
    o, decay = torch.empty_like(v), torch.rand(1, generator=generator)
    tensors = {"q": q, "k": k, "v": v, "o": o, "state": state, "decay": decay}
    blocks = [] if load is None else [1]
    (recorded,) = record(
        entry.read("kernel.o"),
        entry.read("kernel.ptx").decode(),
        [*tensors.values(), None, None, None, None, 0.125, *blocks],
        [(t.data_ptr(), t.numel() * t.element_size(), name) for name, t in tensors.items()],
    )
    return recorded


@functools.cache
def kernel_of(name: str) -> tuple[Ptx, Prepared]:
    if name in SMALL:
        return Ptx(SMALL[name].text), launch_small(SMALL[name])
    recorded = record_lightning(*LIGHTNING[name]) if name in LIGHTNING else record_peer(name)
    return Ptx(recorded.text), launch_recorded(recorded)


KERNELS = [*SMALL, *LIGHTNING, *PEERS]

# -- bugs in small kernels ------------------------------------------------------------------------

Edit = Callable[[Ptx], Ptx]


def dropped(*marks: str) -> Edit:
    return lambda p: p.drop(*(line for mark in marks for line in p.marked(mark)))


def doubled(mark: str) -> Edit:
    return lambda p: p.double(p.mark(mark))


def changed(mark: str, pattern: str, replacement: str) -> Edit:
    return lambda p: p.swap(p.mark(mark), pattern, replacement)


def inserted(mark: str, text: str, *, behind: bool = False) -> Edit:
    return lambda p: p.insert(p.mark(mark), text, behind=behind)


def flipped(mark: str, parity: str) -> Edit:
    return lambda p: p.changed_operand(p.mark(mark), parity, "xor.b32", 1)


def both(*edits: Edit) -> Edit:
    return lambda p: functools.reduce(lambda text, edit: edit(text), edits, p)


def bug(
    kernel: str, name: str, checks: str, edit: Edit, marks: str, severity: str = "error"
) -> Bug:
    """A bug in a kernel with marks; checks and marks are separated by spaces."""

    def plant(p: Ptx) -> Planted:
        return edit(p), [line for mark in marks.split() for line in p.marked(mark)]

    return Bug(name, kernel, plant, tuple(checks.split()), severity)


WAIT_MORE = """xor.b32 %r11, %r3, 1; MORE:
    mbarrier.try_wait.parity.shared::cta.b64 %p19, [%r4], %r11; @!%p19 bra MORE;""".replace(
    "\n", ""
)
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+4], 32;"
DEALLOC = "@!%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bars];"
SKIP_ARRIVE = """setp.eq.u32 %p9, %rank, 0; @%p9 bra SKIP; barrier.cluster.arrive.aligned; SKIP:
    """.strip()
HELD = "@%p7 mov.u32 %r9, 5; bar.sync %r9, 128;"


def relaxed(p: Ptx) -> Ptx:
    """No bug: the barrier behind tcgen05.st as relaxed operations on an mbarrier. The fences of
    tcgen05 on both sides order what they do not."""
    return p.swap(p.mark("init_other"), ", 1;", ", 128;").swap(
        p.mark("stored"),
        r"bar\.sync 0;",
        "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%bars+8]; STORED: "
        "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p9, [%bars+8], 0; "
        "@!%p9 bra STORED;",
    )


SMALL_BUGS = [
    # mbarriers and bulk copies
    bug("PIPELINE", "full wait dropped", "race uninitialised", dropped("full_wait"), "read"),
    bug("PIPELINE", "empty wait dropped", "race", dropped("empty_wait"), "copy"),
    bug("PIPELINE", "full wait doubled", "deadlock", inserted("read", WAIT_MORE), "read"),
    bug("PIPELINE", "release dropped", "deadlock", dropped("release"), "empty_wait"),
    bug("PIPELINE", "release doubled", "barrier", doubled("release"), "release"),
    bug("PIPELINE", "release before the read", "race", both(
        dropped("release"), inserted("read", "mbarrier.arrive.shared::cta.b64 _, [%r4+16];")
    ), "read copy"),
    bug("PIPELINE", "release of another stage", "barrier deadlock", changed(
        "release", r"%r4\+16", "%bars+16"
    ), "release empty_wait"),
    bug("PIPELINE", "expect_tx dropped", "deadlock", dropped("expect"), "copy full_wait"),
    bug("PIPELINE", "expect_tx doubled", "barrier", doubled("expect"), "expect"),
    bug("PIPELINE", "expect_tx 16 too few", "barrier", changed("expect", "256", "240"), "expect"),
    bug("PIPELINE", "expect_tx 2 too few", "barrier", changed("expect", "256", "254"), "expect"),
    bug("PIPELINE", "expect_tx 2 too many", "deadlock", changed("expect", "256", "258"), "expect"),
    bug("PIPELINE", "expect_tx 16 too many", "deadlock", changed("expect", "256", "272"), "expect"),
    bug("PIPELINE", "copy doubled", "race barrier", doubled("copy"), "copy"),
    bug("PIPELINE", "copy signals another stage", "deadlock", changed(
        "copy", r"\[%r4\]", "[%r4+8]"
    ), "copy"),
    bug("PIPELINE", "full parity wrong", "race deadlock uninitialised", flipped("full_wait", "%r3"),
        "read full_wait"),
    bug("PIPELINE", "empty parity wrong", "deadlock", flipped("empty_wait", "%r6"), "empty_wait"),
    bug("PIPELINE", "producer wraps early", "deadlock", changed("wrap", ", 2;", ", 1;"),
        "empty_wait full_wait"),
    bug("PIPELINE", "one buffer for two stages", "race", both(
        changed("stage", "256;", "0;"), changed("consumer_stage", "256;", "0;")
    ), "copy"),
    bug("PIPELINE", "init fence dropped", "proxy-fence", dropped("init_fence"), "copy init",
        severity="note"),
    bug("PIPELINE", "no barrier behind the init", "barrier", dropped("ready"), "full_wait"),
    bug("PIPELINE", "init dropped", "barrier", dropped("init1"), "expect copy"),
    bug("PIPELINE", "init with one too many", "deadlock", changed("init_empty", "32;", "33;"),
        "init_empty"),
    bug("PIPELINE", "init with too few", "barrier", changed("init_empty", "32;", "16;"), "release"),
    bug("PIPELINE", "init while in use", "barrier", inserted(
        "read",
        "setp.eq.u32 %p5, %lane, 0; @%p5 mbarrier.init.shared::cta.b64 [%r4+16], 32;",
        behind=True,
    ), "read"),
    bug("PIPELINE", "inval while in use", "barrier", inserted(
        "read",
        "setp.eq.u32 %p5, %lane, 0; @%p5 mbarrier.inval.shared::cta.b64 [%r4+16];",
        behind=True,
    ), "release read"),
    bug("PIPELINE", "mbarrier overwritten", "barrier", inserted(
        "read", "setp.eq.u32 %p5, %lane, 0; @%p5 st.shared.u32 [%r4], %r10;"
    ), "read"),
    bug("PIPELINE", "exit with a copy in flight", "exit", changed(
        "consumer_count", "6;", "5;"
    ), "copy"),
    bug("PIPELINE", "copy to a misaligned address", "misaligned", changed(
        "copy", r"\[%r5\]", "[%r5+8]"
    ), "copy"),
    bug("PIPELINE", "copy of a misaligned size", "misaligned", changed(
        "copy", ", 256,", ", 248,"
    ), "copy"),
    bug("PIPELINE", "copy past the end", "out-of-bounds", changed("count", "6;", "7;"), "copy"),
    bug("PIPELINE", "store off by one", "out-of-bounds", changed(
        "store", r"\[%rd2\]", "[%rd2+4]"
    ), "store"),
    bug("PIPELINE", "store misaligned", "misaligned", changed(
        "store", r"\[%rd2\]", "[%rd2+2]"
    ), "store"),

    # bulk stores, named barriers
    bug("STORE", "proxy fence dropped", "proxy-fence", dropped("fence"), "copy write"),
    bug("STORE", "no barrier before the copy", "race", dropped("written"), "copy write"),
    bug("STORE", "no barrier behind the copy", "race", dropped("stored"), "copy write"),
    bug("STORE", "bulk commit dropped", "race", dropped("commit"), "copy write"),
    bug("STORE", "bulk wait dropped", "race", dropped("drain"), "copy write"),
    bug("STORE", "bulk wait lets one go on", "race", changed("drain", "0;", "1;"), "copy write"),
    bug("STORE", "thread count too high", "deadlock", changed("written", "128", "160"), "written"),
    bug("STORE", "thread count too low", "race deadlock", changed("written", "128", "96"),
        "copy write written"),
    bug("STORE", "thread count odd", "barrier", changed("written", "128", "100"), "written"),
    bug("STORE", "another barrier for one warp", "deadlock", changed(
        "written", "bar.sync 1, 128;",
        f"setp.eq.u32 %p7, %warp, 0; mov.u32 %r9, 1; {HELD}",
    ), "written"),
    bug("STORE", "exit with a store in flight", "exit", dropped("commit", "drain"), "exit",
        severity="note"),
    bug("STORE", "copy past shared memory", "out-of-bounds", changed("copy", "2048;", "2064;"),
        "copy"),
    bug("STORE", "shared write off by one", "out-of-bounds", changed(
        "write", r"\[%r3\]", "[%r3+16]"
    ), "write"),
    bug("STORE", "shared write misaligned", "misaligned", changed(
        "write", r"\[%r3\]", "[%r3+8]"
    ), "write"),
    bug("NAMED", "bar.arrive dropped", "deadlock", dropped("arrive"), "reader"),
    bug("NAMED", "bar.arrive with another count", "barrier", changed("arrive", "64", "96"),
        "arrive reader"),
    bug("NAMED", "bar.arrive at another barrier", "deadlock", changed("arrive", " 1,", " 4,"),
        "reader"),
    bug("NAMED", "bar.sync of the reader dropped", "race", dropped("reader"), "read write"),
    bug("NAMED", "bar.sync of the writer dropped", "race", dropped("again"), "read rewrite"),
    bug("CROSSED", "waits in opposite order", "deadlock", lambda p: p.drop(
        p.mark("arrive_a")
    ).insert(p.mark("waited_b"), "mbarrier.arrive.shared::cta.b64 _, [%bars];"),
        "wait_a wait_b"),

    # cp.async
    bug("CP_ASYNC", "wait_group dropped", "race", dropped("wait"), "read copy"),
    bug("CP_ASYNC", "wait_group lets two go on", "race", changed("wait", " 1;", " 2;"),
        "read copy"),
    bug("CP_ASYNC", "commit_group dropped", "race", dropped("commit"), "read copy"),
    bug("CP_ASYNC", "no barrier before the read", "race", dropped("landed"), "read copy"),
    bug("CP_ASYNC", "no barrier behind the read", "race", dropped("free"), "read copy"),
    bug("CP_ASYNC", "copy into the stage that is read", "race", changed(
        "copy", r"\[%r8\]", "[%r4]"
    ), "read copy"),
    bug("CP_ASYNC", "copy past the end", "out-of-bounds", changed(
        "copy", r"\[%rd4\]", "[%rd4+256]"
    ), "copy"),

    # lanes, registers, plain accesses
    bug("WARP", "register without a value", "uninitialised", dropped("value"), "store"),
    bug("WARP", "mask of lanes that are elsewhere", "deadlock", changed("half", "0xffff", "-1"),
        "half"),
    bug("WARP", "mask without lanes that are here", "warp-sync", changed(
        "half", "0xffff", "0xff"
    ), "half"),
    bug("WARP", "shfl from a lane that is not here", "warp-sync", changed(
        "half", "8, 15, 0xffff", "16, 31, 0xffff"
    ), "half"),
    bug("WARP", "mask of lanes that have exited", "warp-sync", changed("leave", "bra END", "exit"),
        "together"),
    bug("WARP", "load past the end", "out-of-bounds", changed("load", r"\[%rd4\]", "[%rd4+4]"),
        "load"),
    bug("WARP", "vector store misaligned", "misaligned", changed("address", "16;", "8;"), "store"),
    bug("WARP", "vector store off by one", "out-of-bounds", changed(
        "store", r"\[%rd5\]", "[%rd5+16]"
    ), "store"),
    bug("ALIGNED", "aligned instruction in divergent code", "deadlock warp-sync", changed(
        "condition", ", 32;", ", 31;"
    ), "ldmatrix"),
    bug("ALIGNED", "ldmatrix misaligned", "misaligned", changed(
        "ldmatrix", r"\[%r3\]", "[%r3+8]"
    ), "ldmatrix"),
    bug("ALIGNED", "shared memory never written", "uninitialised", dropped("write"), "ldmatrix"),
    bug("REGISTERS", "setmaxnreg beyond the budget", "deadlock", changed("grow", "216", "224"),
        "grow"),
    bug("REGISTERS", "setmaxnreg.dec dropped", "deadlock", dropped("shrink"), "grow"),
    bug("REGISTERS", "setmaxnreg of 36", "registers", changed("shrink", "40", "36"), "shrink"),
    bug("REGISTERS", "setmaxnreg.dec to more", "registers", changed("shrink", "40", "136"),
        "shrink"),

    # between blocks
    bug("FLAG", "flag without release", "race", changed("raise", "release", "relaxed"),
        "read write"),
    bug("FLAG", "flag as a plain store", "race", changed("raise", r"\.release\.gpu", ""),
        "look raise"),
    bug("FLAG", "flag without acquire", "race", changed("look", "acquire", "relaxed"),
        "read write"),
    bug("FLAG", "no barrier before the flag", "race", dropped("written"), "read write"),
    bug("FLAG", "no barrier behind the flag", "race uninitialised", dropped("seen"), "read write"),
    bug("FLAG", "flag not looked at", "race uninitialised", changed(
        "look", r"ld\.acquire.*;", "mov.u32 %r1, 1;"
    ), "read write"),
    bug("HISTOGRAM", "plain accesses for atomics", "race", changed(
        "count", r"red\.global\.add\.u32 \[%rd2\], %r2;",
        "ld.global.u32 %r3, [%rd2]; add.s32 %r3, %r3, %r2; st.global.u32 [%rd2], %r3;",
    ), "count"),
    bug("CLUSTER", "no cluster barrier at the start", "barrier", dropped("hello", "hello_wait"),
        "arrive"),
    bug("CLUSTER", "cluster wait dropped", "barrier", dropped("hello_wait"), "arrive"),
    bug("CLUSTER", "init not published", "barrier", both(
        changed("hello", "arrive", "arrive.relaxed"), dropped("init_fence")
    ), "arrive", severity="note"),
    bug("CLUSTER", "init of a whole warp not published", "barrier", both(
        changed("hello", "arrive", "arrive.relaxed"), dropped("init_fence"),
        changed("init_all", "@%p1 bra", "// @%p1 bra"),
    ), "arrive", severity="note"),
    bug("CLUSTER", "one block does not arrive", "cluster", changed(
        "hello", r"barrier\.cluster\.arrive\.aligned;", SKIP_ARRIVE
    ), "hello_wait"),
    bug("CLUSTER", "no cluster barrier at the end", "cluster", dropped("bye", "bye_wait"),
        "read_back"),
    bug("CLUSTER", "mapa to a rank that is not there", "cluster", lambda p: p.changed_operand(
        p.mark("mapa"), "%r1", "add.s32", 2
    ), "write"),
    bug("CLUSTER", "remote arrival dropped", "deadlock", dropped("arrive"), "wait"),
    bug("CLUSTER", "arrival at the own barrier", "race uninitialised", changed(
        "arrive", r"\[%r2\]", "[%bars]"
    ), "read write"),
    bug("CLUSTER", "remote arrival relaxed", "race", changed("arrive", "release", "relaxed"),
        "read write"),
    bug("CLUSTER", "wait relaxed", "race", changed("wait", "acquire", "relaxed"), "read write"),
    bug("CLUSTER", "shared::cta with a remote address", "cluster", changed(
        "write", "shared::cluster", "shared::cta"
    ), "write"),
    bug("MULTICAST", "mask without a block", "deadlock", changed("mask", "3;", "1;"), "expect"),
    bug("MULTICAST", "mask beyond the cluster", "cluster", changed("mask", "3;", "7;"), "copy"),
    bug("MULTICAST", "no cluster barrier at the start", "barrier", dropped("hello", "hello_wait"),
        "copy"),

    # wgmma
    bug("WGMMA", "proxy fence dropped", "proxy-fence", dropped("fence"), "wgmma"),
    bug("WGMMA", "no barrier before", "race", dropped("filled"), "wgmma"),
    bug("WGMMA", "wgmma.fence dropped", "wgmma", dropped("wgmma_fence"), "wgmma",
        severity="note"),  # the assembler puts one in where registers were written (C7519)
    bug("WGMMA", "commit_group dropped", "wgmma", dropped("commit"), "wgmma"),
    bug("WGMMA", "wait_group dropped", "wgmma", dropped("wait"), "wgmma"),
    bug("WGMMA", "wait_group lets one go on", "wgmma", changed("wait", "0;", "1;"), "wgmma"),
    bug("WGMMA", "swizzle of 128 bytes for 32", "uninitialised", changed(
        "a_descriptor", r"0x\w+", f"{1 << 62 | 256 >> 4 << 32 | 1 << 16:#x}"
    ), "wgmma"),
    bug("WGMMA", "no swizzle for 32 bytes", "value", changed(
        "a_descriptor", r"0x\w+", f"{256 >> 4 << 32 | 1 << 16:#x}"
    ), "wgmma"),
    bug("WGMMA", "stride twice as large", "uninitialised", changed(
        "a_descriptor", r"0x\w+", f"{3 << 62 | 512 >> 4 << 32 | 1 << 16:#x}"
    ), "wgmma"),
    bug("WGMMA", "descriptor address not cut", "descriptor", changed(
        "b_descriptor", "128;", f"{1 << 14};"
    ), "wgmma"),

    # tcgen05
    bug("TCGEN05", "commit dropped", "deadlock", dropped("commit"), "done"),
    bug("TCGEN05", "commit to another barrier", "deadlock", changed(
        "commit", r"\[%bars\]", "[%bars+8]"
    ), "done"),
    bug("TCGEN05", "commit before the mma", "race", both(
        dropped("commit"), inserted("mma", COMMIT)
    ), "mma ld"),
    bug("TCGEN05", "proxy fence dropped", "proxy-fence", dropped("fence"), "mma"),
    bug("TCGEN05", "no barrier before the mma", "race", dropped("filled"), "mma"),
    bug("TCGEN05", "wait for the mma dropped", "race uninitialised", dropped("done"), "mma ld"),
    bug("TCGEN05", "wait for the second mma dropped", "race", dropped("done2"), "mma2 ld2"),
    bug("TCGEN05", "wait::ld dropped", "race", dropped("wait_ld"), "mma2 ld"),
    bug("TCGEN05", "last wait::ld dropped", "race", dropped("wait_ld2"), "ld2 dealloc"),
    bug("TCGEN05", "wait::st dropped", "race", dropped("wait_st"), "mma2 st"),
    bug("TCGEN05", "no barrier behind the st", "race", dropped("stored"), "mma2 st"),
    bug("TCGEN05", "fence after a wait dropped", "tcgen05-sync", dropped("fence_after"), "ld",
        severity="note"),
    bug("TCGEN05", "fence after a barrier dropped", "tcgen05-sync", dropped("fence_after2"), "mma2",
        severity="note"),
    bug("TCGEN05", "fence before a barrier dropped", "tcgen05-sync", dropped("fence_before"),
        "mma2 st", severity="note"),
    bug("TCGEN05", "fence before a relaxed arrival dropped", "race", both(
        relaxed, dropped("fence_before")
    ), "mma2 st"),
    bug("TCGEN05", "fence behind a relaxed wait dropped", "race", both(
        relaxed, dropped("fence_after2")
    ), "mma2 st"),
    bug("TCGEN05", "dealloc dropped", "tmem", dropped("dealloc"), "alloc"),
    bug("TCGEN05", "dealloc early", "tmem", both(
        dropped("dealloc"), inserted("stored", DEALLOC, behind=True)
    ), "ld2 mma2"),
    bug("TCGEN05", "no barrier before the dealloc", "race", dropped("loaded"), "ld2 dealloc"),
    bug("TCGEN05", "dealloc doubled", "tmem", doubled("dealloc"), "dealloc"),
    bug("TCGEN05", "dealloc of more columns", "tmem", changed("dealloc", "32;", "64;"), "dealloc"),
    bug("TCGEN05", "alloc of 48 columns", "tmem", changed("alloc", "32;", "48;"), "alloc"),
    bug("TCGEN05", "alloc behind relinquish", "tmem", inserted("relinquish", ALLOC, behind=True),
        "relinquish"),
    bug("TCGEN05", "ld beyond the allocation", "tmem", changed("ld", r"\[%r8\]", "[%r8+32]"), "ld"),
    bug("TCGEN05", "ld beyond TMEM", "tmem", changed("ld", r"\[%r8\]", "[%r8+500]"), "ld"),
    bug("TCGEN05", "ld that names no lanes", "tmem", changed("ld", r"\[%r8\]", "[%r4]"), "ld", "note"),
    bug("TCGEN05", "ld of lanes of another warp", "tmem", changed(
        "ld", r"\[%r8\]", f"[%r8+{32 << 16}]"
    ), "ld"),
    bug("TCGEN05", "ld of columns never written", "uninitialised", changed(
        "ld", r"\[%r8\]", "[%r8+16]"
    ), "ld"),
    bug("TCGEN05", "accumulates on nothing", "uninitialised", inserted(
        "mma", "not.pred %p4, %p4;"
    ), "mma"),
    bug("TCGEN05", "st dropped", "uninitialised", dropped("st"), "mma2"),
    bug("TCGEN05", "swizzle of 128 bytes for 32", "uninitialised", changed(
        "a_descriptor", r"0x\w+", f"{2 << 61 | 1 << 46 | 256 >> 4 << 32 | 1 << 16:#x}"
    ), "mma"),
    bug("TCGEN05", "no swizzle for 32 bytes", "value", changed(
        "a_descriptor", r"0x\w+", f"{1 << 46 | 256 >> 4 << 32 | 1 << 16:#x}"
    ), "mma"),
    bug("TCGEN05", "descriptor of sm_90", "descriptor", changed(
        "a_descriptor", r"0x\w+", f"{6 << 61 | 256 >> 4 << 32 | 1 << 16:#x}"
    ), "mma"),
    bug("TCGEN05", "shape that is not there", "descriptor", changed(
        "instruction_descriptor", r"0x\w+", f"{1 << 4 | 16 >> 3 << 17 | 96 >> 4 << 24:#x}"
    ), "mma"),
    bug("TCGEN05", "mma by a whole warp", "tcgen05-sync", changed(
        "issuer", r"setp\.ne\.u32 %p3, %thread, 0;", "setp.ge.u32 %p3, %thread, 32;"
    ), "mma"),
]  # fmt: skip

# -- bugs in whole kernels ------------------------------------------------------------------------

WGMMA = r"^wgmma\.mma_async"
BULK_LOAD = r"cp\.async\.bulk\.shared"
BULK_STORE = r"cp\.async\.bulk\.global"


def wait_before(p: Ptx, line: int) -> list[int]:
    """The last wait for an mbarrier before a line: its loop, and the try_wait before that."""
    loop = p.before(LOOP, line)
    peeks = p.all(PEEK, loop - 10, loop)
    return [*peeks, loop]


def whole(kernel: str, name: str, checks: str, severity: str = "error") -> Callable[..., Any]:
    """Decorates a function that plants a bug in a kernel without marks."""

    def add(plant: Callable[[Ptx], Planted]) -> Callable[[Ptx], Planted]:
        WHOLE_BUGS.append(Bug(name, kernel, plant, tuple(checks.split()), severity))
        return plant

    return add


WHOLE_BUGS: list[Bug] = []

# FlashAttention-4's forward on sm_90


@whole("forward sm_90", "wait for K dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    first = p.one(WGMMA)
    return p.drop(*wait_before(p, first)), [first]


@whole("forward sm_90", "wait for Q dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    first, *others = p.all(WGMMA)[:4]  # the first scores, which are undefined from the last one on
    line = p.one(LOOP, last=wait_before(p, first)[0] - 1, nth=-1)
    return p.drop(line), [first, *others]


@whole("forward sm_90", "parity of the wait for Q wrong", "barrier deadlock race uninitialised")
def _(p: Ptx) -> Planted:
    first, *others = p.all(WGMMA)[:4]
    line = p.one(LOOP, last=wait_before(p, first)[0] - 1, nth=-1)
    return p.changed_operand(line, operand(p, line), "xor.b32", 1), [line, first, *others]


@whole("forward sm_90", "wgmma.fence dropped", "wgmma", severity="note")
def _(p: Ptx) -> Planted:
    line = p.before(r"wgmma\.fence", p.one(WGMMA, nth=-1))
    return p.drop(line), p.all(WGMMA, line)


@whole("forward sm_90", "wgmma.commit_group dropped", "wgmma")
def _(p: Ptx) -> Planted:
    line = p.one(r"wgmma\.commit", nth=1)
    return p.drop(line), p.all(WGMMA, last=line)


@whole("forward sm_90", "wgmma.wait_group before a release dropped", "race")
def _(p: Ptx) -> Planted:
    line = p.one(r"wgmma\.wait_group\S*\s+1")
    return p.drop(line), p.all(WGMMA, last=line)


@whole("forward sm_90", "last wgmma.wait_group dropped", "wgmma")
def _(p: Ptx) -> Planted:
    line = p.one(r"wgmma\.wait_group", nth=-1)
    return p.drop(line), p.all(WGMMA, last=line)


@whole("forward sm_90", "release of K dropped", "deadlock")
def _(p: Ptx) -> Planted:
    line = p.after(RELEASE, p.one(r"wgmma\.wait_group\S*\s+1"))
    loads = p.all(LOAD)
    return p.drop(line), [wait_before(p, load)[-1] for load in loads]


@whole("forward sm_90", "release of K before the wait", "race")
def _(p: Ptx) -> Planted:
    wait = p.one(r"wgmma\.wait_group\S*\s+1")
    release = p.after(RELEASE, wait)
    label = re.search(r"bra\s+(\S+);", p[p.before(r"bra", release)])
    assert label is not None
    text = p[wait].strip()
    return p.drop(wait).insert(p.one(rf"^{re.escape(label[1])}:") + 1, text), p.all(WGMMA)


@whole("forward sm_90", "release of V doubled", "barrier race deadlock")
def _(p: Ptx) -> Planted:
    line = p.after(RELEASE, p.one(r"wgmma\.wait_group\S*\s+0", nth=1))
    return p.double(line), [line, *p.all(LOAD)]


def expected_bytes(p: Ptx, by: int) -> Planted:
    line = p.one(EXPECT, nth=2)  # of K, in the loop
    return p.changed_operand(line, operand(p, line), "add.s32", by), [line]


@whole("forward sm_90", "expect_tx 2 too few", "barrier")
def _(p: Ptx) -> Planted:
    return expected_bytes(p, -2)


@whole("forward sm_90", "expect_tx 16 too many", "deadlock")
def _(p: Ptx) -> Planted:
    return expected_bytes(p, 16)


@whole("forward sm_90", "producer stays in one stage", "race uninitialised")
def _(p: Ptx) -> Planted:
    load = p.one(LOAD, nth=2)  # of K, in the loop
    return p.swap(p.before(r"shl\.b32", load), r"shl\.b32(.*), 14;", r"and.b32\1, 0;"), [
        load,
        *p.all(WGMMA),
    ]


@whole("forward sm_90", "proxy fence before the store dropped", "proxy-fence")
def _(p: Ptx) -> Planted:
    store = p.one(STORE)
    return p.drop(p.before(r"fence\.proxy", store)), [store]


@whole("forward sm_90", "barrier before the store dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    store = p.one(STORE)
    return p.drop(p.before(r"bar\.sync", store)), [store]


@whole("forward sm_90", "bar.arrive with too few threads", "barrier deadlock")
def _(p: Ptx) -> Planted:
    line = p.one(r"bar\.arrive\s+1, 416")
    return p.swap(line, "416", "384"), [line, p.after(r"bar\.sync\s+1, 416", line)]


@whole("forward sm_90", "bar.arrive dropped", "deadlock")
def _(p: Ptx) -> Planted:
    line = p.one(r"bar\.arrive\s+1, 416")
    return p.drop(line), [p.after(r"bar\.sync\s+1, 416", line)]


@whole("forward sm_90", "exit without waiting for the store", "exit", severity="note")
def _(p: Ptx) -> Planted:
    return p.drop(p.after(r"wait_group\.read", p.one(STORE))), [p.one(r"^\s*ret;")]


@whole("forward sm_90", "row bound off by one", "out-of-bounds")
def _(p: Ptx) -> Planted:
    store = p.one(r"^\s*st\.global\.b32", nth=0)
    line = p.before(r"setp\.lt\.s32\s+%p\d+, %r\d+, 1;", store)
    return p.swap(line, r", 1;", ", 0;"), [store]


@whole("forward sm_90", "barrier behind the inits dropped", "barrier")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"bar\.sync\s+0;")), [*p.all(TRY), *p.all(r"mbarrier\.arrive")]


@whole("forward sm_90", "mbarrier.init with too few arrivals", "barrier race deadlock")
def _(p: Ptx) -> Planted:
    line = p.one(r"mov\.b32\s+%r\d+, 12;", nth=1)  # warps that release a stage of K
    return p.swap(line, "12;", "6;"), [*p.all(RELEASE), *p.all(LOAD)]


@whole("forward sm_90", "setmaxnreg beyond the budget", "deadlock")
def _(p: Ptx) -> Planted:
    line = p.one(r"setmaxnreg\.inc")
    return p.swap(line, r"\d+;", "240;"), [line]


@whole("forward sm_90", "descriptor with another swizzle", "value")
def _(p: Ptx) -> Planted:
    swizzled = str(1 << 62 | 64 << 32)[:6]
    line = p.one(rf"or\.b64.*, {swizzled}\d+;")
    value = re.search(r", (\d+);", p[line])
    assert value is not None
    return p.swap(line, value[1], str(int(value[1]) ^ 3 << 62)), [line]


# FlashAttention-4's forward on sm_100


@whole("forward sm_100", "commit of S dropped", "deadlock")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(COMMIT_MMA)), [p.before(LOOP, p.one(TMEM_LOAD))]


@whole("forward sm_100", "commit of S to another barrier", "deadlock barrier")
def _(p: Ptx) -> Planted:
    first, second = p.all(COMMIT_MMA)[:2]
    return p.swap(first, r"\[.*\]", address(p, second)), [
        first,
        second,
        p.before(LOOP, p.one(TMEM_LOAD)),
    ]


@whole("forward sm_100", "commit of S doubled", "barrier deadlock race")
def _(p: Ptx) -> Planted:
    line = p.one(COMMIT_MMA)
    return p.double(line), [line, *p.all(MMA)]


@whole("forward sm_100", "commit that releases K dropped", "deadlock")
def _(p: Ptx) -> Planted:
    line = p.one(COMMIT_MMA, nth=2)
    return p.drop(line), [wait_before(p, load)[-1] for load in p.all(LOAD)]


@whole("forward sm_100", "wait for K dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    mma = p.one(MMA)
    return p.drop(*wait_before(p, mma)), p.all(MMA)


@whole("forward sm_100", "wait for Q dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    mma = p.one(MMA)
    return p.drop(p.before(LOOP, wait_before(p, mma)[0])), p.all(MMA)


@whole("forward sm_100", "wait for S dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    load = p.one(TMEM_LOAD)
    return p.drop(p.before(LOOP, load)), p.all(TMEM_LOAD)


@whole("forward sm_100", "wait for P dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    mma = p.one(rf"{MMA}.*\[tmem_a\]")
    return p.drop(p.before(LOOP, mma)), p.all(MMA)


@whole("forward sm_100", "wait for the rest of P dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    line = p.one(rf"{LOOP}::cta", p.one(rf"{MMA}.*\[tmem_a\]"))
    return p.drop(line), [p.after(MMA, line)]


@whole("forward sm_100", "tcgen05.wait::st dropped", "race")
def _(p: Ptx) -> Planted:
    line = p.one(r"wait::st")
    return p.drop(line), p.all(TMEM_STORE, last=line)


@whole("forward sm_100", "stores of P dropped", "value")  # S is still there
def _(p: Ptx) -> Planted:
    return p.drop(*p.all(TMEM_STORE)), p.all(MMA)


@whole("forward sm_100", "wait for O dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    store = p.one(r"^\s*st\.shared\.v4")
    load = p.before(TMEM_LOAD, store)
    return p.drop(*p.all(LOOP, load - 40, load)), p.all(TMEM_LOAD, load)


@whole("forward sm_100", "proxy fence behind O dropped", "proxy-fence")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"fence\.proxy\.async")), p.all(STORE)


@whole("forward sm_100", "wait for the store of O dropped", "race")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"wait_group\.read\s+1"), p.one(r"wait_group\.read\s+0")), p.all(STORE)


@whole("forward sm_100", "barrier for the row scale dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    line = next(n for n in p.all(r"bar\.sync\s+%r\d+, 64") if "ld.shared.b32" in p[n + 1])
    return p.drop(line), [line + 1]


@whole("forward sm_100", "barrier before the dealloc dropped", "race")
def _(p: Ptx) -> Planted:
    line = p.one(r"tcgen05\.dealloc")
    return p.drop(p.before(r"barrier\.sync", line)), [line]


@whole("forward sm_100", "dealloc dropped", "tmem")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"tcgen05\.dealloc")), [p.one(r"tcgen05\.alloc")]


@whole("forward sm_100", "dealloc of too few columns", "tmem")
def _(p: Ptx) -> Planted:
    line = p.one(r"tcgen05\.dealloc")
    return p.changed_operand(line, operand(p, line), "shr.u32", 1), [line]


@whole("forward sm_100", "barrier behind the alloc dropped", "deadlock race uninitialised")
def _(p: Ptx) -> Planted:
    line = p.after(r"barrier\.sync", p.one(r"setmaxnreg\.inc"))
    return p.drop(line), [*p.all(TMEM_LOAD), *p.all(r"barrier\.sync")]


@whole("forward sm_100", "setmaxnreg.dec dropped", "deadlock")
def _(p: Ptx) -> Planted:
    return p.drop(*p.all(r"setmaxnreg\.dec")), p.all(r"setmaxnreg\.inc")


@whole("forward sm_100", "descriptor with another swizzle", "value")
def _(p: Ptx) -> Planted:
    lines = p.all(r"mov\.b32 smem_desc_b_hi, 0x4000")
    changed = p
    for line in lines:
        changed = changed.swap(line, "0x4000", "0x8000")
    return changed, lines


# FlashAttention-4's backward on sm_90


@whole("backward sm_90", "proxy fence behind dS dropped", "proxy-fence")
def _(p: Ptx) -> Planted:
    line = p.after(r"fence\.proxy", p.one(STMATRIX))
    return p.drop(line), p.all(STMATRIX, last=line)


@whole("backward sm_90", "barrier behind dS dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    line = p.after(r"bar\.sync", p.one(STMATRIX))
    return p.drop(line), p.all(STMATRIX, last=line)


@whole("backward sm_90", "proxy fence behind dQ dropped", "proxy-fence")
def _(p: Ptx) -> Planted:
    line = p.after(r"fence\.proxy", p.one(r"^\s*st\.shared\.v4"))
    return p.drop(line), p.all(r"cp\.reduce")


@whole("backward sm_90", "barrier before the reduction dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    line = p.one(r"cp\.reduce")
    return p.drop(p.before(r"bar\.sync", line)), [line]


@whole("backward sm_90", "bar.arrive for the reduction dropped", "deadlock")
def _(p: Ptx) -> Planted:
    line = p.one(r"bar\.arrive\s+%r")
    return p.drop(line), [p.before(r"bar\.sync", q) for q in p.all(r"cp\.reduce")]


@whole("backward sm_90", "wait for the reduction dropped", "race")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"wait_group\.read\s+1"), p.one(r"wait_group\.read\s+0")), p.all(
        r"cp\.reduce"
    )


@whole("backward sm_90", "commit of the reduction dropped", "race")
def _(p: Ptx) -> Planted:
    line = p.one(r"cp\.reduce")
    return p.drop(p.after(r"commit_group", line)), [line]


@whole("backward sm_90", "last wait for wgmma dropped", "wgmma race")
def _(p: Ptx) -> Planted:
    line = p.one(r"wgmma\.wait_group\S*\s+0", nth=-1)
    return p.drop(line), p.all(WGMMA, last=line)


@whole("backward sm_90", "wait for dO dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    load = p.one(r"^\s*ld\.shared\.v2", nth=-1)
    line = p.one(LOOP, last=load, nth=-1)
    return p.drop(*p.all(PEEK, line - 12, line), line), [*p.all(WGMMA), *p.all(r"ld\.shared")]


# quack's GEMM on sm_90, two CTAs of a cluster sharing B


@whole("gemm sm_90", "multicast to one block", "deadlock")
def _(p: Ptx) -> Planted:
    load = p.one(r"\.multicast::cluster")
    return p.swap(p.before(r"mov\.b16", load), "3;", "1;"), [p.before(EXPECT, load), load]


@whole("gemm sm_90", "multicast beyond the cluster", "cluster")
def _(p: Ptx) -> Planted:
    load = p.one(r"\.multicast::cluster")
    return p.swap(p.before(r"mov\.b16", load), "3;", "7;"), [load]


@whole("gemm sm_90", "release in the own block alone", "deadlock race barrier")
def _(p: Ptx) -> Planted:
    line = p.after(r"mapa", p.one(r"wgmma\.wait_group\S*\s+1"))
    changed = p.swap(line, r"mapa\S*\s+(%r\d+), (%r\d+), %r\d+;", r"mov.b32 \1, \2;")
    return changed, [p.after(RELEASE, line), *p.all(LOAD), *p.all(LOOP)]


@whole("gemm sm_90", "cluster barrier dropped", "barrier")
def _(p: Ptx) -> Planted:
    lines = [*p.all(r"barrier\.cluster\.arrive"), *p.all(r"barrier\.cluster\.wait")]
    return p.drop(*lines), [
        *p.all(TRY),
        *p.all(r"mbarrier\.arrive"),
        *p.all(LOAD),
        *p.all("st.async"),
    ]


@whole("gemm sm_90", "wait before a load dropped", "race")
def _(p: Ptx) -> Planted:
    load = p.one(LOAD)
    loop = p.before(LOOP, load)
    first = p.before(PEEK, loop)
    return p.drop(first, loop, p.after(PEEK, load)), p.all(LOAD)


@whole("gemm sm_90", "wait for the stores dropped", "race")
def _(p: Ptx) -> Planted:
    return p.drop(*p.all(r"wait_group\.read\s+3")), p.all(STORE)


@whole("gemm sm_90", "proxy fence before a store dropped", "proxy-fence")
def _(p: Ptx) -> Planted:
    store = p.one(STORE)
    return p.drop(p.before(r"fence\.proxy", store)), [store]


@whole("gemm sm_90", "st.async to a block that is not there", "cluster")
def _(p: Ptx) -> Planted:
    line = p.one(r"st\.async")
    base = re.search(r"\[(%r\d+)\], abcd", p[line])
    assert base is not None
    return p.insert(line, f"add.s32 {base[1]}, {base[1]}, 0x4000000;"), [line]


# quack's GEMM on sm_100


@whole("gemm sm_100", "release of the accumulator dropped", "deadlock")
def _(p: Ptx) -> Planted:
    line = p.after(RELEASE, p.one(r"wait::ld"))
    return p.drop(line), [p.before(LOOP, p.before(LOOP, p.one(MMA)))]


@whole("gemm sm_100", "wait for a free accumulator dropped", "race")
def _(p: Ptx) -> Planted:
    mma = p.one(MMA)
    return p.drop(p.before(LOOP, p.before(LOOP, mma))), p.all(MMA)


@whole("gemm sm_100", "commit of the accumulator dropped", "deadlock")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(COMMIT_MMA, nth=-1)), [p.before(LOOP, p.one(TMEM_LOAD))]


@whole("gemm sm_100", "commit of a stage doubled", "barrier race deadlock")
def _(p: Ptx) -> Planted:
    line = p.one(COMMIT_MMA)
    return p.double(line), [line, *p.all(LOAD)]


@whole("gemm sm_100", "wait for the accumulator dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    load = p.one(TMEM_LOAD)
    return p.drop(p.before(LOOP, load)), p.all(TMEM_LOAD)


@whole("gemm sm_100", "wait for the tile dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    load = p.before(r"ld\.shared\.v4", p.one(TMEM_LOAD))
    return p.drop(p.before(LOOP, load)), [load]


@whole("gemm sm_100", "barrier behind the alloc dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    line = p.after(r"bar\.sync", p.one(r"tcgen05\.alloc"))
    return p.drop(line), [p.after(r"ld\.shared", line)]


@whole("gemm sm_100", "bar.arrive for the dealloc dropped", "deadlock")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"bar\.arrive")), [p.before(r"bar\.sync", p.one(r"tcgen05\.dealloc"))]


@whole("gemm sm_100 pairs", "commit to the own block alone", "deadlock race barrier")
def _(p: Ptx) -> Planted:
    line = p.one(COMMIT_MMA)
    mask = operand(p, line)
    return p.with_line(
        line,
        f"{{ .reg .b16 one; and.b16 one, {mask}, 1; {p[line].strip().replace(mask, 'one')} }}",
    ), [line, *p.all(LOAD), *p.all(LOOP)]


@whole("gemm sm_100 pairs", "commit beyond the cluster", "cluster")
def _(p: Ptx) -> Planted:
    line = p.one(COMMIT_MMA)
    mask = operand(p, line)
    return p.with_line(
        line,
        f"{{ .reg .b16 more; or.b16 more, {mask}, 4; {p[line].strip().replace(mask, 'more')} }}",
    ), [line]


@whole("gemm sm_100 pairs", "try_cancel dropped", "deadlock")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"try_cancel")), [p.before(LOOP, q) for q in p.all(r"ld\.shared\.v2\.b64")]


@whole("gemm sm_100 pairs", "wait for the answer dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    load = p.one(r"ld\.shared\.v2\.b64", nth=-1)
    return p.drop(p.before(LOOP, load)), [load]


@whole(
    "gemm sm_100 pairs", "fences behind the inits dropped", "proxy-fence barrier", severity="note"
)
def _(p: Ptx) -> Planted:
    return p.drop(*p.all(r"fence\.mbarrier_init")), [
        *p.all(LOAD),
        *p.all(TRY),
        *p.all(r"mbarrier\.(arrive|init)"),
        *p.all(COMMIT_MMA),
    ]


@whole("gemm sm_100 pairs", "dealloc in one block", "tmem deadlock")
def _(p: Ptx) -> Planted:
    line = p.one(r"tcgen05\.dealloc")
    return p.with_line(
        line,
        "{ .reg .b32 rank; .reg .pred odd; mov.u32 rank, %cluster_ctarank; "
        f"setp.eq.u32 odd, rank, 1; @!odd {p[line].strip()} }}",
    ), [line, p.one(r"tcgen05\.alloc")]


# FlashAttention-4's combination of splits on sm_100


@whole("combine sm_100", "last split with a value taken from another row", "uninitialised")
def _(p: Ptx) -> Planted:
    """A row beyond the last one, which nothing has written, then bounds the loop of one that is."""
    line = p.before(r"shfl\.sync\.bfly", p.one(r"max\.s32", nth=-1))
    return p.swap(line, ", 1, 31, -1;", ", 16, 31, -1;"), [p.one(r"^\s*st\.global\.v2\.b32")]


# Lightning decode, bulk copies both ways: each warp has a ring of its own


@whole("lightning bulk", "wait dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(TRY)), p.all(r"^\s*ld\.shared")


@whole("lightning bulk", "parity wrong", "deadlock race uninitialised")
def _(p: Ptx) -> Planted:
    line = p.one(TRY)
    return p.changed_operand(line, operand(p, line), "xor.b32", 1), [
        line,
        *p.all(r"^\s*ld\.shared"),
    ]


@whole("lightning bulk", "expect_tx dropped", "deadlock")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(EXPECT, nth=-1)), p.all(TRY)


@whole("lightning bulk", "expect_tx 16 too few", "barrier")
def _(p: Ptx) -> Planted:
    line = p.one(EXPECT)
    return p.changed_operand(line, operand(p, line), "sub.s32", 16), [line]


@whole("lightning bulk", "proxy fence dropped", "proxy-fence")
def _(p: Ptx) -> Planted:
    line = p.one(r"fence\.proxy")
    return p.drop(line), [p.after(BULK_STORE, line)]


@whole("lightning bulk", "wait for the store dropped", "race")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"wait_group\.read\s+1")), p.all(BULK_STORE)


@whole("lightning bulk", "commit of the store dropped", "race")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"commit_group")), p.all(BULK_STORE)


@whole("lightning bulk", "init fence dropped", "proxy-fence", severity="note")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"fence\.mbarrier_init")), p.all(BULK_LOAD)


@whole("lightning bulk", "exit without waiting for the store", "exit", severity="note")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"wait_group\.read\s+0")), [p.one(r"^\s*ret;")]


@whole("lightning vector", "wait dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(TRY)), p.all(r"^\s*ld\.shared")


@whole("lightning cp.async", "wait_group dropped", "race")
def _(p: Ptx) -> Planted:
    return p.drop(p.one(r"cp\.async\.wait_group")), p.all(r"^\s*ld\.shared")


@whole("lightning cp.async", "commit_group dropped", "race")
def _(p: Ptx) -> Planted:
    return p.drop(*p.all(r"cp\.async\.commit_group")), p.all(r"^\s*ld\.shared")


@whole("lightning cp.async", "copy of 16 bytes to the next one", "race out-of-bounds uninitialised")
def _(p: Ptx) -> Planted:
    line = p.one(r"^\s*cp\.async\.cg", nth=-1)
    return p.swap(line, r"\[(%r\d+)\+", r"[\1+16+"), [line, *p.all(r"ld\.shared")]


@whole("lightning registers", "barrier dropped", "race uninitialised")
def _(p: Ptx) -> Planted:
    return p.drop(*p.all(r"bar(rier)?\.(cta\.)?sync")), p.all(r"ld\.shared")


@whole("lightning registers", "store of o off by one", "out-of-bounds race misaligned")
def _(p: Ptx) -> Planted:
    line = p.one(r"^\s*(@%p\d+ )?st\.global\.b16", nth=-1)
    return p.swap(line, r"\]", "+128]"), [line]


# -- the tests ------------------------------------------------------------------------------------

BUGS = [*SMALL_BUGS, *WHOLE_BUGS]


def is_quick(kernel: str) -> bool:
    """`make test` runs only a few bugs in peers' kernels, whose pipelines are alike."""
    return kernel not in PEERS or kernel in QUICK_PEERS


@pytest.mark.parametrize("kernel", slow_but(KERNELS, is_quick, str))
def test_the_kernel_is_clean(kernel: str) -> None:
    _, launch = kernel_of(kernel)
    run = launch(None)
    for schedule, seed in SEEDS:
        done, right = run(schedule, seed)
        assert done.errors == [] and right, (schedule, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_is_clean_on_more_seeds(kernel: str) -> None:
    _, launch = kernel_of(kernel)
    run = launch(None)
    for schedule, seed in (*MORE_SEEDS, *STARVING_SEEDS):
        done, right = run(schedule, seed)
        assert done.errors == [] and right, (schedule, seed)


def test_fences_of_tcgen05_order_what_relaxed_operations_do_not() -> None:
    ptx, launch = kernel_of("TCGEN05")
    run = launch(relaxed(ptx).text)
    for schedule, seed in SEEDS:
        done, right = run(schedule, seed)
        assert done.findings == [] and right, (schedule, seed)


def check(bug: Bug, seeds: Iterable[tuple[int, int]]) -> None:
    ptx, launch = kernel_of(bug.kernel)
    changed, lines = bug.plant(ptx)
    run = launch(changed.text)
    for schedule, seed in seeds:
        done, right = run(schedule, seed)
        found = "\n".join(map(str, done.findings)) or f"nothing; the result is right: {right}"
        assert reported(bug, done, set(lines), right), f"{(schedule, seed)}: {found}"


@pytest.mark.parametrize("bug", slow_but(BUGS, lambda bug: is_quick(bug.kernel), name_of))
def test_the_bug_is_reported(bug: Bug) -> None:
    check(bug, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_bug_is_reported_on_more_seeds(bug: Bug) -> None:
    check(bug, MORE_SEEDS)
    if bug.kernel in SMALL:
        check(bug, STARVING_SEEDS)
