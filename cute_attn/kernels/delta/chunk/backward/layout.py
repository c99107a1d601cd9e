"""The shared memory of `gradients`, and where its warps find their elements.

Warp 4 n + b has the rows of sub-chunk b, and the n-th part of the channels. A thread has
accumulators of 16 rows by 8 channels (see `common.ptx.mma`), and operands of 16 tokens by 8
channels; for each 16 channels there is a pair of accumulator fragments and a pair of operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....common.dtypes import DTYPE
from ....common.pipeline import Edge, Kind, Pipeline, Role
from ....common.ptx.convert import unpack
from ....common.ptx.memory import load_shared, store_shared
from ....common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ....common.spec import MBARRIER_BYTES, WARP_SIZE
from ..spec import CHUNK, GradientsSpec, HeadGradientsSpec
from ..sub_chunks import SUB_CHUNK, SUB_CHUNKS, row_and_part
from ..tiles import SUB_TILE_BYTES, right_fragments, right_offsets, thread_and_warp, tile_offset

PART = 32  # channels per warp
PAIRS = PART // 16
SUMS = 8 * PAIRS  # accumulators of a thread for 16 rows and its warp's channels
TILE_V = 64  # columns of V per stage


def load_floats(address: Any, count: int) -> list[Any]:
    """Load 1, 2, 4 or 8 neighbouring elements from shared memory."""
    values: list[Any] = []
    for n in range(0, count, 4):
        values += load_shared(Float32, address + 4 * n, min(count, 4))
    return values


def channels_of(spec: GradientsSpec) -> int:
    """The channels of K of one CTA."""
    return spec.head_dim_k // spec.cluster


def all_warps(spec: GradientsSpec) -> Role:
    return Role("gradients", range(channels_of(spec) // PART * SUB_CHUNKS))


def tokens(name: str, holds: str = "") -> Buffer:
    """A number for each token."""
    return Buffer(name, Float32, CHUNK, holds=holds)


class ChunkGradientMemory(SharedMemory):
    """Shared memory of a CTA that works on a chunk, a head of q and k, and `channels` of K.

    Args:
        gates: the buffers of the gates' sums.
        more: further buffers.
        edges: further edges of the pipeline, whose role is `all_warps`.
    """

    def __init__(
        self, spec: GradientsSpec, gates: Sequence[Buffer], more: Sequence[Buffer] = (),
        edges: Sequence[Edge] = (),
    ):  # fmt: skip
        self.dtype, self.l2norm = DTYPE[spec.dtype], spec.l2norm
        self.channels = channels_of(spec)
        self.p_row = 4 * self.channels
        self.parts = self.channels // PART
        self.num_threads = self.parts * SUB_CHUNKS * WARP_SIZE
        self.all_parts = self.parts * spec.cluster
        warps = all_warps(spec)
        self.roles = (warps,)
        own = []
        if spec.copies == "bulk":
            payload = "64 columns of V of S, of dS' and of v'"
            own.append(Edge("stage_full", warps, warps, 1, Kind.BYTES, payload=payload))
        if spec.exchanges:
            payload = "the other CTA's sums of q dq and k dk"
            own.append(Edge("along_full", warps, warps, 1, Kind.BYTES, payload=payload))
        self.pipeline = Pipeline(*own, *edges)

        def tile(name: str, holds: str = "") -> Buffer:
            alignment = SWIZZLE_ALIGNMENT
            return Buffer(name, self.dtype, CHUNK * TILE_V, alignment=alignment, holds=holds)

        def channels(name: str, holds: str = "") -> Buffer:
            return Buffer(name, self.dtype, CHUNK * self.channels, holds=holds)

        self.stage = SharedMemory(
            tile("do"), tile("dr"), tile("v_new"), channels("state"), channels("adjoint")
        )
        super().__init__(
            Buffer.ring("stage", self.stage, 1),
            Buffer("q", self.dtype, CHUNK * self.channels, alignment=SWIZZLE_ALIGNMENT),
            channels("k"),
            Buffer("daqk", self.dtype, CHUNK * CHUNK, holds="scale dAqk below its diagonal"),
            Buffer("dlower", self.dtype, CHUNK * CHUNK, holds="the gradient of L / beta"),
            *gates,
            tokens("own_score", "scale dAqk on its diagonal; before that, beta as given"),
            tokens("inverse_norm_q"),
            tokens("inverse_norm_k"),
            # A buffer for each part of the channels, and for each of two rows 8 apart.
            Buffer("along", Float32, self.all_parts * 2 * CHUNK, holds="sums of q dq and k dk"),
            *more,
            *(
                [Buffer("barriers", Int64, self.pipeline.count, alignment=MBARRIER_BYTES)]
                if self.pipeline.count
                else []
            ),
        )
        self.offsets["beta"] = self["own_score"]

    # -- places of a thread's elements --------------------------------------------------------

    def warp_place(self) -> tuple[Any, Any]:
        """Return the warp's sub-chunk and part of the channels."""
        _, warp = thread_and_warp()
        return warp & (SUB_CHUNKS - 1), warp >> 2

    def first_unit(self) -> Any:
        """Return the warp's first unit of 8 channels."""
        return self.warp_place()[1] * (2 * PAIRS)

    def operand_offsets(self) -> list[Any]:
        """Return the lane's byte offsets, for each pair, of `operands` in 64 rows of K channels."""
        unit = self.first_unit()
        tile = (unit >> 3) * SUB_TILE_BYTES
        swap = (unit & 7) << 4
        return [(x ^ swap) + tile for x in right_offsets()[:PAIRS]]

    def operands(self, matrix: Any, step: Any, pair: int) -> Any:
        """Load rows 16 step to 16 step + 15 of the warp's 16 channels as two right operands."""
        return right_fragments(matrix, self.operand_offsets(), step, pair)

    def rows(self) -> list[Any]:
        """Return the two rows of the chunk for which the thread has accumulators."""
        b, _ = self.warp_place()
        r, _ = row_and_part()
        return [b * SUB_CHUNK + r, b * SUB_CHUNK + r + 8]

    def accumulator_channel(self, pair: int, i: int) -> Any:
        """Return the first of the two neighbouring channels of the thread's accumulators."""
        return ((self.first_unit() + (2 * pair + i)) << 3) + 2 * row_and_part()[1]

    def operand_channel(self, pair: int, i: int) -> Any:
        return ((self.first_unit() + (2 * pair + i)) << 3) + row_and_part()[0]

    def load_raw(self, smem: Int32, name: str, row: Any, channel: Int32) -> tuple[Any, Any]:
        """Load two neighbouring channels of q or k, as given."""
        at = smem + self[name] + tile_offset(row, channel)
        return unpack(self.dtype, load_shared(Int32, at)[0])

    def load_pair(self, smem: Int32, name: str, row: Any, channel: Int32) -> list[Any]:
        """Load two neighbouring channels of normalised q or k."""
        values = list(self.load_raw(smem, name, row, channel))
        if self.l2norm:
            norm = self.of_token(smem, f"inverse_norm_{name}", row)
            values = [x * norm for x in values]
        return values

    def of_token(self, smem: Int32, name: str, row: Any) -> Any:
        return load_shared(Float32, smem + self[name] + row * 4)[0]


class GradientMemory(ChunkGradientMemory):
    """The shared memory for a gate of each channel.

    P is the sum of gates (base 2) from a sub-chunk's first token, whose P is 0. 32-byte unit u of
    row r of P lies at unit u ^ (r & 7). dG later overwrites P.

    Decayed q and k (see `decayed_products`) overwrite the stage, once a head's columns of V are
    done.
    """

    def __init__(self, spec: GradientsSpec):
        elements = SUB_CHUNKS * channels_of(spec)

        def sums(name: str, holds: str) -> Buffer:
            return Buffer(name, Float32, elements, holds=holds)

        super().__init__(
            spec,
            gates=[
                Buffer("p", Float32, CHUNK * channels_of(spec)),
                sums("first", "the gate of a sub-chunk's first token"),
                sums(
                    "steps", "G from there to the next sub-chunk's first token, or the chunk's end"
                ),
                sums("to_end", "G from there to the end of the chunk"),
                sums("into_state", "sum over a sub-chunk of kg dkg"),
                sums("of_state", "the state times its gradient, summed over a part of V"),
                sums("later", "dG, summed over a sub-chunk; before that, m of each beta"),
                sums("of_A_log", "the gradient of A_log, summed over a sub-chunk"),
                sums("of_dt_bias", ""),
            ],
            more=[Buffer("out_of_range", Int32, 4 * SUB_CHUNKS, holds="a warp's first such row")],
        )
        for n, name in enumerate(("q_rows", "k_rows", "k_columns")):
            self.offsets[name] = self["stage"] + n * (2 * CHUNK * self.channels)
        self.offsets["m"] = self["later"]
        operands = 3 * (2 * CHUNK * self.channels)
        assert operands <= self.stage.nbytes
        # Registers that threads put aside lie behind the operands, and later over them.
        self.offsets["aside"] = self["stage"] + operands
        self.can_put_aside = operands + self.num_threads * SUMS * 4 <= self.stage.nbytes

    def p_place(self, row: Any, channel: Int32, name: str = "p") -> Any:
        """Byte offset of an element of P, or of another matrix in its layout."""
        unit = (channel >> 3) ^ (row & 7)
        return self[name] + row * self.p_row + (unit << 5) + ((channel & 7) << 2)

    def load_p(self, smem: Int32, row: Any, channel: Int32, count: int) -> list[Any]:
        return load_floats(smem + self.p_place(row, channel), count)

    def load_sums(self, smem: Int32, name: str, b: Int32, channel: Int32, count: int = 1) -> Any:
        """Load a sub-chunk's sums of `count` channels."""
        at = smem + self[name] + b * self.p_row + (channel << 2)
        return load_floats(at, count)

    # -- registers put aside ------------------------------------------------------------------

    def put_aside(self, at: Any, values: cute.Tensor) -> None:
        """Store a thread's SUMS values in shared memory from `at` on, so that they do not spill.
        Values for which there is no room stay in registers."""
        for place, n in self._aside(at):
            store_shared(Float32, place, [values[n + i] for i in range(4)])

    def take_back(self, at: Any, values: cute.Tensor) -> None:
        for place, n in self._aside(at):
            for i, x in enumerate(load_shared(Float32, place, 4)):
                values[n + i] = x

    def _aside(self, at: Any) -> list[tuple[Any, int]]:
        if not self.can_put_aside:
            return []
        thread, _, _ = cute.arch.thread_idx()
        return [(at + (n * self.num_threads + thread * 4) * 4, n) for n in range(0, SUMS, 4)]


class HeadGradientMemory(ChunkGradientMemory):
    """The shared memory for a gate of each head.

    The stage holds no operands, so the next head's tiles are loaded while a head is finished. With
    `spec.keeps_sums` the gradients of q and k, summed over the group, lie in shared memory.
    """

    def __init__(self, spec: HeadGradientsSpec):
        warps = all_warps(spec)
        edges = []
        if spec.cluster > 1:
            payload = "the other CTA's part of dg, for half of the tokens"
            edges.append(Edge("gates_full", warps, warps, 2, Kind.BYTES, payload=payload))
        threads = len(warps) * WARP_SIZE

        def rows(name: str, holds: str) -> Buffer:
            return Buffer(name, Float32, channels_of(spec) // PART * CHUNK, holds=holds)

        super().__init__(
            spec,
            gates=[
                tokens("coarse", "G, the sum of gates, in two parts: see `per_head.head_gates`"),
                tokens("fine"),
                tokens("gate_input", "g as given"),
                tokens("m", "m of each beta"),
                rows(
                    "of_tokens", "q dq + k row - k col, without products with the state's gradient"
                ),
                rows("of_end", "k col, the products with the state's gradient alone"),
                Buffer("of_state", Float32, len(warps), holds="a warp's sum of S dS'"),
                *([Buffer("gates_received", Float32, 2 * CHUNK // 2)] if edges else []),
                *([Buffer("sums", Float32, 2 * threads * SUMS)] if spec.keeps_sums else []),
            ],
            edges=edges,
        )

    def gate(self, smem: Int32, token: Any) -> tuple[Any, Any]:
        """Load both parts of G of a token."""
        coarse, fine = (self.of_token(smem, name, token) for name in ("coarse", "fine"))
        return coarse, fine
