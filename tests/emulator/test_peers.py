"""Kernels of other packages that are right on hardware: here too, and with nothing to report.

Each runs with all checks on. Its results must have no more than twice the error of a plain
computation in the same data types, and no finding may be an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from cute_attn.bench.peers import Captured, Request
from cute_attn.bench.peers.flash_attention_4 import backward, forward
from cute_attn.bench.peers.quack_kernels import (
    cross_entropy_backward,
    cross_entropy_forward,
    gemm,
    norm_backward,
    norm_forward,
    softmax_backward,
    softmax_forward,
    topk_backward,
    topk_forward,
)
from cute_attn.emulator import Emulator, Finding, Report

from . import peer_results
from .peer_captures import (
    BACKWARD_SM100,
    QUICK,
    QUICK_REQUESTS,
    SM90,
    SM100,
    UNEVEN,
    capture,
)

SM120 = "sm_120a"
SCHEDULES = [("random", 1), ("random", 2), ("adversarial", 0)]


def attention(arch: str, head_dim: int, both: list[dict[str, Any]]) -> list[Request]:
    return [
        f(arch=arch, head_dim=head_dim, **options) for options in both for f in (forward, backward)
    ]


GROUPED = {"heads": 4, "qhead_per_kvhead": 2, "causal": True, "seqlen_q": 130}
VARLEN = {"causal": True, "seqlens_q": (100, 60, 1), "seqlens_k": (130, 60, 77)}
PAGED = {"batch": 2, "causal": True, "seqlen_q": 150, "seqlen_k": 300}

NVFP4, MXFP4 = (
    gemm(arch=SM100, m=128, n=128, k=256, block_scaled=kind) for kind in ("nvfp4", "mxfp4")
)

USUAL = [
    *attention(SM90, 64, [UNEVEN]),
    *attention(SM100, 64, [UNEVEN]),
    *attention(SM90, 128, [UNEVEN]),
    *attention(SM100, 128, [UNEVEN]),
    *attention(SM90, 256, [UNEVEN]),
    *attention(SM100, 256, [UNEVEN]),
    gemm(arch=SM90, m=200, n=136, c=True),
    gemm(arch=SM100, m=512, tile=(256, 128), cluster=(2, 1), scheduler="dynamic", num_sms=4),
    gemm(arch=SM90, dtype="float8_e4m3fn", cluster=(2, 1)),
    NVFP4,
    norm_forward(arch=SM90, m=2, n=32768),
    softmax_forward(arch=SM90),
    cross_entropy_forward(arch=SM90, dx=True),
    topk_forward(arch=SM90),
]

ATTENTION = [
    *(
        request
        for arch in (SM90, SM100)
        for head_dim in (64, 128, 256)
        for request in (
            *attention(
                arch, head_dim, [{"heads": 1, "seqlen_q": 128, "seqlen_k": 256}, GROUPED, VARLEN]
            ),
            backward(arch=arch, head_dim=head_dim, deterministic=True, causal=True, seqlen_q=200),
        )
    ),
    *(
        request
        for arch in (SM90, SM100)
        for head_dim in (64, 128)
        for request in (
            *attention(
                arch,
                head_dim,
                [
                    {"heads": 1, "window": (64, 0), "seqlen_q": 300},
                    {"heads": 1, "window": (30, 50), "seqlen_q": 300, "seqlen_k": 350},
                    {"heads": 1, "softcap": 10.0, "causal": True, "seqlen_q": 150},
                ],
            ),
            forward(
                arch=arch,
                head_dim=head_dim,
                heads=8,
                qhead_per_kvhead=8,
                pack_gqa=True,
                seqlen_q=5,
                seqlen_k=300,
                causal=True,
            ),
            forward(arch=arch, head_dim=head_dim, learnable_sink=True, causal=True, seqlen_q=150),
            backward(
                arch=arch,
                head_dim=head_dim,
                qhead_per_kvhead=2,
                deterministic=True,
                causal=True,
                seqlen_q=200,
            ),
        )
    ),
    *(
        request
        for arch in (SM90, SM100)
        for request in (
            *attention(arch, 192, [{"head_dim_v": 128, "heads": 1, "causal": True}]),
            *attention(arch, 128, [{"heads": 1, "seqlen_q": 300, "seqlen_k": 200, "causal": True}]),
            *attention(arch, 96, [{"heads": 1, "seqlen_q": 200}]),
            forward(arch=arch, dtype="float16", heads=1, seqlen_q=150),
        )
    ),
    *(
        forward(arch=arch, head_dim=head_dim, page_size=page_size, **PAGED)
        for arch in (SM90, SM100)
        for head_dim in (64, 128, 256)
        for page_size in (16, 64, 128)  # of a tile: by TMA; of less: gathered with cp.async
    ),
    *(forward(arch=SM100, head_dim=d, num_splits=3, seqlen_q=64, seqlen_k=600) for d in (64, 128)),
    forward(arch=SM100, head_dim=64, num_splits=3, seqlen_q=37, seqlen_k=600),
    *(forward(arch=SM100, head_dim=d, dtype="float8_e4m3fn", **UNEVEN) for d in (64, 128)),
    *(
        request
        for head_dim in (64, 128)
        for request in (
            forward(arch=SM100, head_dim=head_dim, heads=4, clc=True, causal=True, seqlen_q=400),
            forward(arch=SM100, head_dim=head_dim, heads=4, clc=True, seqlens_q=(100, 300, 20)),
            *attention(SM100, head_dim, [{"heads": 1, "two_cta": False}]),
            *attention(
                SM120, head_dim, [UNEVEN, {"seqlens_q": (100, 60)}, GROUPED | {"causal": False}]
            ),
            forward(arch="sm_80", head_dim=head_dim, **UNEVEN),
        )
    ),
]

GEMMS = [
    *(
        request
        for arch in (SM90, SM100, SM120)
        for request in (
            gemm(arch=arch, cluster=(2, 1), m=512),
            gemm(arch=arch, scheduler="dynamic", m=512, num_sms=4),
            gemm(arch=arch, dtype="float8_e4m3fn"),
            gemm(arch=arch, a_major="m", b_major="n"),
            gemm(arch=arch, c=True, bias=True, alpha=0.5, beta=2.0),
            gemm(arch=arch, seqlens_m=(100, 60, 200), n=128),
            gemm(arch=arch, k=512, split_k=2),
        )
    ),
    *(
        request
        for arch in (SM100, SM120)
        for request in (
            gemm(arch=arch, m=128, n=128, k=256, block_scaled="mxfp8_e4m3"),
            gemm(arch=arch, m=128, n=128, k=256, block_scaled="mxfp4"),
        )
    ),
    gemm(arch=SM90, pingpong=True, tile=(64, 128)),
    gemm(arch=SM120, pingpong=True),
    gemm(arch=SM120, scheduler="none", m=200, n=136),
    gemm(arch=SM120, m=128, n=128, k=256, block_scaled="nvfp4"),
    gemm(arch=SM100, m=512, tile=(256, 128), cluster=(2, 1)),
    gemm(arch=SM100, k=512, split_k=3, tile=(256, 128), cluster=(2, 1)),
    gemm(arch=SM100, tile=(256, 128), cluster=(2, 1), k=256, block_scaled="nvfp4"),
]

ROWS = [
    request
    for arch in (SM90, SM100)
    for request in (
        norm_forward(arch=arch, m=3, n=1000, residual=True, bias=True),
        norm_forward(arch=arch, layernorm=True),
        norm_backward(arch=arch),
        norm_backward(arch=arch, layernorm=True),
        softmax_forward(arch=arch, m=2, n=40000),
        softmax_backward(arch=arch),
        cross_entropy_forward(arch=arch, m=2, n=40000),
        cross_entropy_backward(arch=arch),
        topk_forward(arch=arch, k=8, softmax=True),
        topk_backward(arch=arch),
        topk_backward(arch=arch, softmax=True),
    )
]

SLOW = [BACKWARD_SM100, *USUAL, *ATTENTION, *GEMMS, *ROWS]


# By cluster launch control, whose answers may come early.
CLC = [
    gemm(arch=SM100, scheduler="dynamic", m=512, num_sms=4),
    gemm(arch=SM100, m=512, tile=(256, 128), cluster=(2, 1), scheduler="dynamic", num_sms=4),
    gemm(arch=SM120, scheduler="dynamic", m=512, num_sms=4),
    forward(arch=SM100, head_dim=64, heads=4, clc=True, seqlens_q=(100, 300, 20)),
    forward(arch=SM100, head_dim=128, heads=4, clc=True, causal=True, seqlen_q=400),
]


def parameters(quick: list[Request], slow: list[Request]) -> list[Any]:
    rest = [r for r in dict.fromkeys(slow) if r not in quick]
    return [
        *(pytest.param(r, id=r.name) for r in quick),
        *(pytest.param(r, id=r.name, marks=pytest.mark.slow) for r in rest),
    ]


@pytest.fixture
def captured(kernel: Request, request: pytest.FixtureRequest) -> Captured:
    """The kernel's capture. All that the test run needs are compiled in batches."""
    if kernel in QUICK_REQUESTS:
        return capture(kernel, QUICK_REQUESTS)
    parameters = [
        item.callspec.params.get("kernel")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    return capture(kernel, [r for r in parameters if isinstance(r, Request)])


def is_known(captured: Captured, finding: Finding) -> bool:
    """Whether a finding is a bug of the kernel, see docs/bugs_found.md.

    FlashAttention-4's backward for two CTAs on sm_100a, head dimension 128: the last two releases,
    of Kt and dS, are signalled to the peer CTA as well, which does not wait for them and may exit.
    """
    options = dict(captured.request.options)
    which = (captured.request.peer, captured.request.function, captured.request.arch)
    if which != ("flash_attention_4", "backward", SM100) or options["head_dim"] != 128:
        return False
    main = captured.calls[1].function
    lines = enumerate(main.ptx.split("\n"), 1)
    releases = [n for n, text in lines if re.search(r"tcgen05\.commit.*multicast", text)]
    return (
        finding.kernel in main.entries
        and finding.check == "exit"
        and finding.line in releases[-2:]
        and finding.message.startswith("tcgen05.commit signals an mbarrier of CTA rank 1")
    )


def check(
    captured: Captured, edit: Callable[[str], str] = lambda ptx: ptx, **options: Any
) -> Report:
    """Run the call with its PTX edited, and compare its results. Returns the report."""
    given = peer_results.inputs(captured)
    memory = captured.materialise(given)
    emulator = Emulator(on_findings="collect", **options)
    for buffer in captured.buffers.values():
        if buffer.role == "scratch":  # some get there as a bare address
            emulator.expose(memory.tensors[buffer.name], buffer.name)
    for call in captured.calls:
        image = call.function.object_file.read_bytes()
        emulator.load_object(image, edit(call.function.ptx))(*memory.arguments(call))
    report = emulator.report
    errors = report.errors
    if options.get("schedule") == "adversarial":  # no other one shows it
        errors = [f for f in errors if not is_known(captured, f)]
    assert not errors, "\n".join(map(str, errors))
    assert memory.overwritten_guards() == []
    results = peer_results.results(captured, memory.tensors)
    for name, (exact, plain) in peer_results.expected(captured, given).items():
        ours, theirs = (peer_results.error(x, exact) for x in (results[name], plain))
        assert ours <= 2 * theirs + 1e-6, f"{name}: error {ours}, plain computation {theirs}"
    return report


@pytest.mark.parametrize("kernel", parameters(QUICK, SLOW))
def test_agrees_and_is_clean(captured: Captured) -> None:
    check(captured)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("kernel", parameters([QUICK[0], QUICK[2]], [*QUICK, *SLOW]))
def test_agrees_on_other_schedules(captured: Captured, schedule: tuple[str, int]) -> None:
    check(captured, schedule=schedule[0], seed=schedule[1])


@pytest.mark.slow  # that of planted bugs stands for it
@pytest.mark.parametrize("kernel", parameters([BACKWARD_SM100], []))
def test_the_known_bug_is_still_there(captured: Captured) -> None:
    report = check(captured, schedule="adversarial", seed=0)
    assert report.errors and all(is_known(captured, finding) for finding in report.errors)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kernel", parameters([QUICK[2]], CLC))
def test_survives_early_answers_of_cluster_launch_control(captured: Captured, seed: int) -> None:
    """Some clusters then stop early, and the others have to do the remaining work."""
    schedule = ("fair", "random", "random", "adversarial")[seed]
    check(captured, schedule=schedule, seed=seed, spurious_cancel=True)


@pytest.mark.parametrize("kernel", parameters([NVFP4], [MXFP4]))
def test_block_scaled_with_the_other_sparsity_version(captured: Captured) -> None:
    """Bit 12 of the instruction descriptor, which the DSL's builder sets, means nothing here."""

    def edit(ptx: str) -> str:
        descriptors = r"(?<=selp\.b32).*, \d{9}, \d{9}, %p\d+;"  # with and without a negated A
        numbers = r"\b\d{9}\b"
        assert len(re.findall(descriptors, ptx)) == 1
        return re.sub(
            descriptors,
            lambda m: re.sub(numbers, lambda n: str(int(n[0]) | 1 << 12), m[0]),
            ptx,
        )

    check(captured, edit)


def flops(report: Report) -> int:
    return sum(n for _, n in report.mma.values())


@pytest.mark.parametrize(
    "kernel",
    parameters(
        [QUICK[0]],
        [forward(arch=arch, heads=1, seqlen_q=256, seqlen_k=256) for arch in (SM90, SM100)],
    ),
)
def test_counts_of_attention(captured: Captured) -> None:
    report = check(captured)
    options = dict(captured.request.options)
    row = options["heads"] * options["head_dim"]
    queries, keys = options["seqlen_q"] * row, options["seqlen_k"] * row
    assert flops(report) == 2 * 2 * queries * options["seqlen_k"]
    assert report.bytes["tma_store"] == 2 * queries
    assert report.bytes["tma_load"] % (2 * 128 * row) == 0
    assert report.bytes["tma_load"] >= 2 * (queries + 2 * keys)


@pytest.mark.parametrize(
    "kernel",
    parameters(
        [QUICK[2]],
        [
            gemm(arch=SM90, m=256, n=128, k=192),
            gemm(arch=SM100, m=256, n=128, k=192),
            gemm(arch=SM100, m=256, n=128, k=192, tile=(256, 128), cluster=(2, 1)),
        ],
    ),
)
def test_counts_of_a_gemm(captured: Captured) -> None:
    report = check(captured)
    options = dict(captured.request.options)
    m, n, k = (options[name] for name in "mnk")
    assert flops(report) == 2 * m * n * k
    assert report.bytes["tma_store"] == 2 * m * n
    rows = 256 if options["cluster"] == (2, 1) else 128  # of A that one load of a tile of B serves
    assert report.bytes["tma_load"] == 2 * k * (m * n // 128 + n * m // rows)
