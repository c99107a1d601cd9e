"""Selection and tuning of the chunked KDA kernels."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

from ...common.spec import MBARRIER_BYTES, SMALLEST_SMEM_BYTES, smem_bytes
from .spec import (
    CHUNK,
    FORWARD_STAGES,
    MOST_HEADS_PER_CTA,
    HeadForwardSpec,
    HeadPassSpec,
    record_elements,
)

MOST_STAGES = 3  # stages of a pass: more hide no further latency

# Measured on an H100: 12 heads are fastest in 3 segments (121 us rather than 155 at 8192 tokens,
# 370 rather than 600 at 32768), 32 heads without segments.
CTAS_PER_SM = 78 / 132  # target for the pass that writes outputs
FEWEST_CHUNKS_OF_A_SEGMENT = 16
FEWEST_CHUNKS_OF_A_START = 4
FEWEST_STARTS = 3  # segments that start from zero, for calls without exact transitions
MOST_SEGMENTS = 16


def state_pass_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The tuning fields of a StatePassSpec: at most MOST_STAGES stages, as many as fit."""
    del head_dim_v  # a multiple of the tile
    tile_v = 64
    stage = 2 * (record_elements(head_dim_k) + CHUNK * tile_v) + max(1024, head_dim_k * 4)
    num_stages = min(MOST_STAGES, smem_bytes(arch) // (stage + MBARRIER_BYTES))
    return {
        "tile_v": tile_v,
        "num_stages": num_stages,
        "copies": "bulk" if has_bulk_copies(arch) else "cp_async",
        "products": "wgmma" if arch == "sm_90a" else "mma",
        "segments": "none",
    }


def segments_pass_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The fields of a StatePassSpec with segments that differ from `state_pass_config`."""
    shares = arch == "sm_90a" and head_dim_k % 128 == 0 and head_dim_v % 128 == 0
    return {"cluster": 2 if shares else 1}


def has_dependent_launch(arch: str) -> bool:
    """Whether kernels of segments start before the end of the previous kernel."""
    return arch == "sm_90a"


def has_head_path(arch: str) -> bool:
    """Whether the fused path for one decay a head (`per_head`) has kernels."""
    return arch == "sm_90a"


def head_pass_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The tuning fields of a HeadPassSpec."""
    del arch
    return {
        "cluster": 1 if head_dim_k % 128 or head_dim_v % 128 else 2,
        "tile_v": 64,
        "num_stages": MOST_STAGES,
        "copies": "bulk",
        "products": "wgmma",
        "segments": "none",
    }


def head_forward_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The tuning fields of a HeadForwardSpec."""
    config = head_pass_config(arch=arch, head_dim_k=head_dim_k, head_dim_v=head_dim_v)
    return config | {"num_stages": FORWARD_STAGES}


# Measured on an H100. With 16/32 heads, 32 ragged sequences of 8 chunks on average take 387 us in
# one kernel and 412 us in two, 64 sequences of 2 chunks 302 and 281. With 8/32 heads, 256 CTAs
# (4x2048) take 141 and 151 us, 64 CTAs (1x8192) 262 and 201.
FEWEST_CHUNKS_IN_ONE_KERNEL = 8  # of a sequence, on average
FEWEST_CTAS_IN_ONE_KERNEL = 0.9  # of the SMs


def in_one_kernel(
    spec: HeadForwardSpec, *, sequences: int, tokens: int, heads: int, num_sms: int
) -> bool:
    """Whether `per_head.forward` is faster than `prepare` and the pass over whole sequences. It
    is not if several clusters of a value head prepare each chunk, or if SMs are idle on which
    `prepare` could run. Short sequences have few chunks, whose latencies one kernel cannot hide.

    Args:
        tokens: tokens of all sequences together.
    """
    columns = spec.head_dim_v // spec.tile_v
    return (
        columns == spec.cluster
        and tokens >= FEWEST_CHUNKS_IN_ONE_KERNEL * CHUNK * sequences
        and sequences * heads * columns >= FEWEST_CTAS_IN_ONE_KERNEL * num_sms
    )


class SegmentTimes(NamedTuple):
    """Microseconds of passes over segments, from measurements on an H100.

    Attributes:
        outputs, transitions: a chunk of each pass.
        step: a step of `segments`.
        kernels: what three kernels cost more than one.
    """

    outputs: float
    transitions: float
    step: float
    kernels: float


# By the kind of pass, see `chunks_per_segment`.
SEGMENT_TIMES = {
    "head": SegmentTimes(outputs=1.0, transitions=1.0, step=4.5, kernels=10.0),
    "shared": SegmentTimes(outputs=1.2, transitions=0.95, step=4.5, kernels=13.0),
}


def pass_kind(spec: Any) -> str:
    """The kind of a forward's pass, see `chunks_per_segment`."""
    if isinstance(spec, HeadPassSpec):
        return "head"
    return "shared" if spec.cluster > 1 else "channel"


def chunks_per_segment(
    kind: str,
    *,
    sequences: int,
    tokens: int,
    heads: int,
    head_dim_k: int,
    head_dim_v: int,
    packed: bool,
    num_sms: int,
) -> int:
    """Chunks of a segment with exact transitions, or 0 where sequences are not split.

    A pass has a CTA for each sequence, value head and 64 columns of V. Where these CTAs leave most
    SMs idle, splitting sequences into segments is faster.

    Args:
        kind: "channel" (a decay of each channel), "shared" (such a pass, whose two CTAs of a head
            share copies) or "head" (one decay a head).
        tokens: tokens of each sequence, or of all packed sequences together.
    """
    columns = head_dim_v // 64
    # The host only knows the total length of packed sequences; one sequence may have all tokens.
    ctas = heads * (1 if packed else sequences)
    chunks = -(-tokens // CHUNK)
    if kind == "channel":
        most = int(CTAS_PER_SM * num_sms)
        if most // (sequences * heads * columns) < 2:
            return 0
        segments = min(most // (ctas * columns), MOST_SEGMENTS)
        length = max(FEWEST_CHUNKS_OF_A_SEGMENT, -(-chunks // segments))
        return length if length < chunks else 0

    # Each SM has one CTA, so a pass takes as long as its chunks times its waves of CTAs. With more
    # CTAs, the bytes of KDA's records limit a pass.
    if (3 if kind == "shared" else 2) * sequences * heads * columns > num_sms:
        return 0
    times = SEGMENT_TIMES[kind]
    best, found = chunks * times.outputs, 0
    for segments in range(2, MOST_SEGMENTS + 1):
        length = -(-chunks // segments)
        # The first segment needs no M.
        moves = ctas * ((segments - 1) * columns + (segments - 2) * (head_dim_k // 64))
        time = length * times.transitions * -(-moves // num_sms)
        time += length * times.outputs * -(-segments * ctas * columns // num_sms)
        time += times.step * (segments - 2) + times.kernels
        if time < best:
            best, found = time, length
    return found


# CTAs of `per_head.prepare` for each SM below which CTAs have fewer value heads.
PREPARE_CTAS_PER_SM = 1.5


def heads_per_cta(*, chunks: int, heads_qk: int, heads: int, num_sms: int) -> int:
    """Value heads of a CTA of `per_head.prepare`, which all have one head of q and k."""
    group = heads // heads_qk
    count = min(group, MOST_HEADS_PER_CTA)
    while count > 1 and chunks * heads_qk * -(-group // count) < PREPARE_CTAS_PER_SM * num_sms:
        count = -(-count // 2)
    return count


def has_bulk_copies(arch: str) -> bool:
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90


def chunks_per_start(
    kind: str,
    *,
    sequences: int,
    tokens: int,
    heads: int,
    head_dim_v: int,
    packed: bool,
    num_sms: int,
) -> int:
    """Chunks of a segment that may start from a state of zero (see `starts`), for a call that
    splits sequences. These segments need no transitions, so there are enough for all SMs.

    Args:
        kind: as for `chunks_per_segment`.
        tokens: tokens of each sequence, or of all packed sequences together.
    """
    ctas = int(CTAS_PER_SM * num_sms) if kind == "channel" else num_sms
    columns = heads * (head_dim_v // 64) * (1 if packed else sequences)
    segments = min(max(ctas // columns, 1), MOST_SEGMENTS)
    return max(FEWEST_CHUNKS_OF_A_START, -(-tokens // (CHUNK * segments)))


def only_starts(kind: str, *, head_dim_k: int, **sizes: Any) -> int:
    """All chunks of a call, if its segments may start from zero but do not pay for exact
    transitions; otherwise 0. Heads whose gates are weak then are one segment. Arguments are those
    of `chunks_per_segment`."""
    del head_dim_k
    chunks = -(-sizes["tokens"] // CHUNK)
    length = chunks_per_start("channel" if kind == "shared" else kind, **sizes)
    sequences = sizes["sequences"] if sizes["packed"] else 1
    return chunks if (FEWEST_STARTS - 1) * length * sequences < chunks else 0


def gradients_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The tuning fields of a GradientsSpec.

    Raises:
        NotImplementedError: the kernel's shared memory does not fit.
    """
    del head_dim_v  # a multiple of a stage's columns
    bulk = has_bulk_copies(arch)
    cluster = head_dim_k // 64 if bulk else 1
    # A test compares this number with the kernel's declaration.
    if smem_bytes(arch) < 44_000 + 896 * (head_dim_k // cluster):
        raise NotImplementedError(f"the backward at head_dim_k={head_dim_k} does not fit {arch}")
    return {"cluster": cluster, "copies": "bulk" if bulk else "cp_async"}


def head_gradients_config(
    *, arch: str, head_dim_k: int, head_dim_v: int, grouped: bool
) -> dict[str, Any]:
    """The tuning fields of a HeadGradientsSpec.

    Raises:
        NotImplementedError: the kernel's shared memory does not fit.
    """
    del head_dim_v  # a multiple of a stage's columns
    bulk = has_bulk_copies(arch)
    cluster = head_dim_k // 64 if bulk else 1
    channels = head_dim_k // cluster
    # A test compares these numbers with the kernel's declaration.
    nbytes = 43_300 + 528 * channels + 16 * head_dim_k
    if smem_bytes(arch) < nbytes:
        raise NotImplementedError(f"the backward at head_dim_k={head_dim_k} does not fit {arch}")
    keeps_sums = grouped and nbytes + 512 * channels <= smem_bytes(arch)
    return {
        "cluster": cluster,
        "copies": "bulk" if bulk else "cp_async",
        "keeps_sums": keeps_sums,
    }


def segments_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The tuning fields of a SegmentsSpec: narrow tiles, and two stages where they fit."""
    del head_dim_v  # a multiple of the tile
    tile_v = 16
    states = 2 * tile_v * (head_dim_k + 4) * 4
    transition = head_dim_k * (head_dim_k + 8) * 4
    return {"tile_v": tile_v, "num_stages": min(2, (smem_bytes(arch) - states) // transition)}


def delta_h_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The tuning fields of a DeltaHSpec."""
    del head_dim_k, head_dim_v
    # More stages are slower (measured on an H100).
    return {"tile_v": 64, "num_stages": 2, "products": "wgmma" if arch == "sm_90a" else "mma"}


def delta_h_backward_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The tuning fields of a DeltaHBackwardSpec: two stages where they fit."""
    config = delta_h_config(arch=arch, head_dim_k=head_dim_k, head_dim_v=head_dim_v)
    stage = 2 * CHUNK * (3 * head_dim_k + 2 * config["tile_v"])
    fits = 2 * stage + 8 * head_dim_k <= smem_bytes(arch)
    return config | {"num_stages": 2 if fits else 1}


def output_config(*, arch: str, head_dim_k: int, head_dim_v: int) -> dict[str, Any]:
    """The tuning fields of an OutputSpec. Where several CTAs with tiles of 128 columns of V fit an
    SM, tiles have up to 128 columns, so that q and G are read rarely.
    """
    del head_dim_k
    narrow = smem_bytes(arch) == SMALLEST_SMEM_BYTES
    return {"tile_v": 64 if narrow else gcd(head_dim_v, 128)}
