"""Is a fence needed after mbarrier.init? Kernels that use a fresh mbarrier at once, many times.

    python -m tests.emulator.mbarrier_init

runs on a GPU. A trial initialises an mbarrier in bytes that hold -1, without a fence, with
fence.mbarrier_init or with fence.proxy.async. Other threads, the asynchronous proxy or the
cluster's other CTA signal the mbarrier, and all threads wait for it. The command counts waits that
time out and data that are wrong. Each kernel runs in a process that may fail alone.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from typing import Any

ITERATIONS, CTAS, LAUNCHES, LIMIT = 400, 1056, 12, 1 << 21
SHARED = 20480
SIZE = 512  # bytes of a copy: a word for each thread

HEAD = """.version 8.3
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .u64 px, .param .u64 pout, .param .u32 pn)
.reqntid 128 {cluster}
{{
.reg .pred p, c, first, second, bad, lead, noisy;
.reg .b32 t, i, n, a, b, you, me, buf, peer_buf, r, v, want, slot, off, noise, wide, src;
.reg .b64 x, out, q, s, t0, t1, dt, junk;
ld.param.u64 x, [px]; ld.param.u64 out, [pout]; ld.param.u32 n, [pn];
mov.u32 t, %tid.x; mov.b32 i, 0;
setp.eq.u32 first, t, 0; setp.eq.u32 second, t, 32;
mov.u32 me, %cluster_ctarank; xor.b32 you, me, 1; setp.eq.u32 lead, me, 0;
shl.b32 noise, t, 7; and.b32 noise, noise, 3968; mov.b32 r, dynamic; add.u32 noise, noise, r;
add.u32 noise, noise, 8192;
again:
and.b32 slot, i, 31; shl.b32 slot, slot, 4;
mov.b32 a, dynamic; add.u32 buf, a, 2048; add.u32 src, a, 16384; add.u32 a, a, slot;
and.b32 off, i, 255; shl.b32 off, off, 4; cvt.u64.u32 q, off; add.s64 q, x, q;
{mapped}
{source}
bar.sync 0;
"""
NOISE = "\n".join(f"st.shared.b32 [noise+{4 * k}], i;" for k in range(8))
TAIL = """
mov.u64 t0, %clock64;
waiting:
mbarrier.test_wait.parity.shared::cta.b64 c, [a], 0; @c bra waited;
mov.u64 t1, %clock64; sub.s64 dt, t1, t0; setp.lt.s64 c, dt, {limit}; @c bra waiting;
setp.ne.u32 bad, t, 9999; bra counted;
waited: setp.eq.u32 bad, t, 9999;
counted:
{check}
bar.red.or.pred c, 0, bad; and.pred c, c, first;
@c red.global.add.u32 [out], 1;
@first red.global.add.u32 [out+8], 1;
{sync}
@first mbarrier.inval.shared::cta.b64 [a];
{closing}
add.u32 i, i, 1; setp.lt.u32 p, i, n; @p bra again;
{sync}
ret;
}}
"""
CHECK = """
shl.b32 r, t, 2; add.u32 r, r, buf; ld.shared.b32 v, [r];
shl.b32 want, t, 2; add.u32 want, want, off; {bias}
setp.ne.u32 p, v, want; @p red.global.add.u32 [out+4], 1;
"""
SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
MAPPED = "mapa.shared::cluster.u32 b, a, you; mapa.shared::cluster.u32 peer_buf, buf, you;"
FENCES = {
    "none": "",
    "mbarrier_init": "@first fence.mbarrier_init.release.cluster;",
    "proxy.async": "@first fence.proxy.async.shared::cta;",
}
EXPECT = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [a], {SIZE};"
BULK = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    f"[{{to}}], [q], {SIZE}, [{{bar}}]{{more}};"
)
OWN = BULK.format(to="buf", bar="a", more="")
SMEM = (
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
    f"[{{to}}], [src], {SIZE}, [{{bar}}];"
)
SOURCE = """
shl.b32 r, t, 2; add.u32 v, r, off; add.u32 r, r, src; st.shared.b32 [r], v; fence.proxy.async;
"""


def kernel(
    use: str,
    *,
    fence: str = "none",
    count: int = 1,
    directive: str = "",
    between: str = "bar.sync 0;",
    cluster: bool = False,
    data: bool = True,
    noisy: bool = False,
    source: bool = False,
    before: str = "",
) -> str:
    """PTX of a kernel.

    Args:
        use: what signals the mbarrier.
        fence: a key of `FENCES`, behind the initialisation.
        count: arrivals of a phase.
        directive: in place of the directive for `cluster`.
        between: the barrier between initialisation and use.
        cluster: whether two CTAs form a cluster.
        data: whether copied data are compared.
        noisy: stores with bank conflicts go before the initialisation.
        source: shared memory is filled, for copies from there.
        before: instructions in place of the store of -1.
    """
    junk = "mov.b64 junk, -1; @first st.shared.b64 [a], junk;" if not before else ""
    sync = SYNC if cluster else "bar.sync 0;"
    return (
        HEAD.format(
            cluster=directive or (".reqnctapercluster 2" if cluster else ""),
            mapped=MAPPED if cluster else "",
            source=SOURCE if source else "",
        )
        + junk
        + before
        + (NOISE if noisy else "")
        + f"\n@first mbarrier.init.shared::cta.b64 [a], {count};\n"
        + f"{FENCES[fence]}\n{between}\n{use}\n"
        + TAIL.format(
            limit=LIMIT, check=CHECK.format(bias="") if data else "", sync=sync, closing=sync
        )
    )


def guarded(guard: str, *lines: str) -> str:
    """Instructions under a guard."""
    return "\n".join(f"@{guard} {line}" for line in lines)


def variants() -> dict[str, tuple[str, bool]]:
    """PTX by name, and whether failures are expected."""
    found: dict[str, tuple[str, bool]] = {}

    def add(name: str, use: str, bad: bool = False, **options: Any) -> None:
        found[name] = kernel(use, **options), bad

    pre = (
        "@first mbarrier.init.shared::cta.b64 [a], 1; bar.sync 0; "
        + guarded("second", "mbarrier.arrive.shared::cta.b64 _, [a];")
        + " bar.sync 0;"
    )
    add("control: initialised after the arrival", "", before=pre, data=False, bad=True)
    fences = ("none", "mbarrier_init", "proxy.async")
    add(
        "threads arrive, bar.sync", "mbarrier.arrive.shared::cta.b64 _, [a];", count=128, data=False
    )
    add(
        "threads arrive, bar.sync, noise",
        "mbarrier.arrive.shared::cta.b64 _, [a];",
        count=128,
        data=False,
        noisy=True,
    )
    add(
        "cp.async arrives, bar.sync",
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [a];",
        count=128,
        data=False,
    )
    for noisy in (False, True):
        tail = ", noise" if noisy else ""
        for fence in fences:
            rest: dict[str, Any] = {"fence": fence, "noisy": noisy}
            add(
                f"bulk copy by the same thread, no barrier; fence {fence}{tail}",
                guarded("first", EXPECT, OWN) + "\nbar.sync 0;",
                between="",
                **rest,
            )
            add(
                f"bulk copy by another warp, bar.sync; fence {fence}{tail}",
                guarded("second", EXPECT, OWN),
                **rest,
            )
    remote = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [b];"
    stored = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [peer_buf], v, [b];"
    for sync, text in (("release", SYNC), ("relaxed", RELAXED)):
        for fence in fences[:2]:
            rest = {"between": text, "cluster": True, "fence": fence, "noisy": True}
            tail = f"cluster barrier {sync}; fence {fence}"
            add(f"the peer's threads arrive, {tail}", remote, count=128, data=False, **rest)
            add(
                f"the peer's bulk copy, {tail}",
                guarded("second", EXPECT, BULK.format(to="peer_buf", bar="b", more="")),
                **rest,
            )
            add(
                f"the peer's copy from shared memory, {tail}",
                guarded("second", EXPECT, SMEM.format(to="peer_buf", bar="b")),
                source=True,
                **rest,
            )
            add(
                f"multicast by CTA 0, {tail}",
                guarded("second", EXPECT)
                + "\nand.pred p, second, lead; mov.b32 r, 3; { .reg .b16 both; mov.b16 both, 3;\n"
                + "@p "
                + BULK.format(to="buf", bar="a", more=", both").replace(
                    "complete_tx::bytes ", "complete_tx::bytes.multicast::cluster "
                )
                + " }",
                **rest,
            )
            add(
                f"the peer's st.async, {tail}",
                guarded("second", EXPECT)
                + "\nshl.b32 r, t, 2; add.u32 v, r, off; add.u32 peer_buf, peer_buf, r;\n"
                + stored,
                **rest,
            )
    own = guarded("second", EXPECT, SMEM.format(to="buf", bar="a"))
    add(
        "copy from shared memory to own shared memory, cluster of 1",
        own,
        source=True,
        fence="mbarrier_init",
        directive=".reqnctapercluster 1",
    )
    add(
        "copy from shared memory to own shared memory, cluster of 2",
        own,
        source=True,
        fence="mbarrier_init",
        cluster=True,
    )
    add(
        "copy from shared memory to own shared memory, no cluster",
        own,
        source=True,
        fence="mbarrier_init",
    )
    return found


def measure(name: str) -> str:
    """Run a kernel on the GPU; the counts, in words."""
    import torch

    torch.zeros(1, device="cuda")
    cuda = ctypes.CDLL("libcuda.so.1")
    text, bad = variants()[name]
    began = time.time()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    code = cuda.cuModuleLoadData(ctypes.byref(module), text.encode() + b"\0")
    code = code or cuda.cuModuleGetFunction(ctypes.byref(function), module, b"k")
    x = torch.arange(0, 4 * 2048, 4, dtype=torch.int32, device="cuda")
    out = torch.zeros(3, dtype=torch.int32, device="cuda")
    iterations, launches = (2, 1) if bad else (ITERATIONS, LAUNCHES)
    values = (
        ctypes.c_uint64(x.data_ptr()), ctypes.c_uint64(out.data_ptr()), ctypes.c_uint32(iterations)
    )  # fmt: skip
    pointers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
    for _ in range(launches):
        code = code or cuda.cuLaunchKernel(
            function, CTAS, 1, 1, 128, 1, 1, SHARED, None, pointers, None
        )
        if code:
            raise RuntimeError(f"CUDA error {code}")
        torch.cuda.synchronize()
        if out[0] > 100:
            break
    timeouts, wrong, trials = out.tolist()
    took = time.time() - began
    return f"{trials} trials, {timeouts} timeouts, {wrong} wrong words, {took:.2f} s"


def main() -> None:
    if len(sys.argv) > 1:
        print(measure(sys.argv[1]))
        return
    for name in variants():
        command = [sys.executable, "-m", "tests.emulator.mbarrier_init", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = (done.stdout or done.stderr).strip().splitlines()
        errors = [line for line in lines if "Error" in line]
        print(f"{name}: {(errors or lines)[-1]}", flush=True)


if __name__ == "__main__":
    main()
