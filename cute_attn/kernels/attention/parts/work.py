"""The tiles of an attention kernel: their number, and the block, head and sequence of each."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...common.carried import Carried
from ...common.sequences import Sequences
from ...common.spec import WARP_SIZE

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..spec import BackwardSpec, ForwardSpec

L2_BYTES = 32 * 1024 * 1024  # budget for the data that tiles reread; the rest of L2 is for streams
LAST_TILES = 2  # at least so many tiles per cluster are in the last group
HALVES = 2  # tiles per cluster of a group in `in_halves`


@dataclass(frozen=True)
class Work(Carried):
    """A tile of one head of one sequence.

    Attributes:
        block: index of the tile in its sequence. The tile has query rows, or with `TileMap.of_keys`
            keys.
        head: query head, or index of the pack of heads that share the tile's rows.
        q_start, k_start: first row of a packed sequence, otherwise 0.
    """

    block: Int32
    head: Int32
    kv_head: Int32
    sequence: Int32
    q_start: Int32
    seqlen_q: Int32
    k_start: Int32
    seqlen_k: Int32

    @property
    def exists(self) -> Boolean:
        """False after the last tile."""
        return self.block >= 0

    @property
    def queries(self) -> tuple[Int32, Int32, Int32, Int32]:
        """(head, sequence, start, length) of q, as `BoxedRows.box` takes them."""
        return self.head, self.sequence, self.q_start, self.seqlen_q

    def lse_at(self, head: Int32, token: Int32, packed: bool) -> tuple[Any, ...]:
        """The index of a query's log-sum-exp."""
        return (head, self.q_start + token) if packed else (self.sequence, head, token)

    def o_at(self, head: Int32, token: Int32, packed: bool) -> tuple[Any, ...]:
        """The index of a query's row of o."""
        row = (self.q_start + token,) if packed else (self.sequence, token)
        return (*row, head, None)

    @property
    def keys(self) -> tuple[Int32, Int32, Int32, Int32]:
        """(head, sequence, start, length) of k and v."""
        return self.kv_head, self.sequence, self.k_start, self.seqlen_k


@dataclass(frozen=True)
class SplitWork(Work):
    """A part of the K/V tiles of a tile.

    Attributes:
        split, splits: the index of the part, and the number of parts.
    """

    split: Int32
    splits: Int32

    def lse_at(self, head: Int32, token: Int32, packed: bool) -> tuple[Any, ...]:
        return (self.split, *super().lse_at(head, token, packed))

    def o_at(self, head: Int32, token: Int32, packed: bool) -> tuple[Any, ...]:
        return (self.split, *super().o_at(head, token, packed))

    def part(self, first: Int32, end: Int32, key_tiles: int = 0) -> tuple[Int32, Int32]:
        """The part's K/V tiles among first to end - 1. All parts but the last few have equally many
        tiles. With `key_tiles`, the parts are the same for every tile: each part has so many of the
        sequence's K/V tiles, and the last part has the rest."""
        if key_tiles:
            low = self.split * key_tiles
            high = cutlass.select_(self.split == self.splits - 1, end, low + key_tiles)
            first = cutlass.min(cutlass.max(first, low), end)
            return first, cutlass.max(first, cutlass.min(high, end))
        length = (end - first + (self.splits - 1)) // self.splits
        first = cutlass.min(first + self.split * length, end)
        return first, cutlass.min(first + length, end)


def head_and_split(work: Work, num_splits: Int32, partial: bool) -> tuple[Int32, Int32]:
    """The K/V head of a tile of keys, and the number of its split."""
    if not partial:
        return work.kv_head, 0
    head = work.kv_head // num_splits
    return head, work.kv_head - head * num_splits


def heads_in_l2(head_bytes: Int64, heads: Int32) -> Int32:
    """How many heads fit L2 together, if tiles reread `head_bytes` of each head."""
    at_once = cutlass.max(Int32(1), Int32(L2_BYTES // (head_bytes + 1)))
    return cutlass.min(at_once, heads)


def following(
    tile: Int32,
    head: Int32,
    first: Int32,
    end: Int32,
    step: Int32 = 1,
    lowest: Int32 | None = None,
) -> tuple[Int32, Int32]:
    """The next tile of queries, and its head. After all tiles of a head comes the next head's first
    tile. `head` may be any number that grows by `step` from head to head. With `lowest`, tile
    `lowest` follows a head's last tile."""
    last = tile + 1 == end
    if lowest is None:
        return cutlass.select_(last, first, tile + 1), cutlass.select_(last, head + step, head)
    tile = cutlass.select_(last, lowest, tile + 1)
    return tile, cutlass.select_(tile == first, head + step, head)


def first_lane(holds: Int32) -> Int32:
    """The first lane of a ballot."""
    return cute.arch.popc((holds & -holds) - 1)


@cute.jit
def sums_up_to(x: Int32) -> Int32:
    """The sum of x over the lanes up to the caller's own; a whole warp calls this."""
    lane, total = cute.arch.lane_idx(), x
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            total += other
    return total


@dataclass(frozen=True)
class TileMap(Carried):
    """Maps the number of a tile to its block, head and sequence.

    Within a packed sequence, or a group of heads whose reread data fit L2, the block is the slow
    index. Later blocks come first if they take longer.

    Attributes:
        tile_size: rows of a tile, or keys with `of_keys`.
        packed_heads: query heads that share the rows of a tile.
        longest_last: later blocks take longer, and therefore get smaller numbers.
        heads: heads, or packs of heads, that have tiles of their own.
        group: query heads of a K/V head.
        heads_at_once: heads, counted across sequences, that share L2.
        of_keys: tiles divide the keys of K/V heads, rather than the rows of (packs of) query heads.
        last_tiles: the last heads, which together have `last_tiles` tiles, are one group, even if
            these heads do not fit L2. None: no such group. Packed sequences have no such group.
        first_block, num_blocks: in each sequence, only `num_blocks` blocks from `first_block` on
            are tiles. None: all blocks are tiles.
    """

    tile_size: int
    packed_heads: int
    longest_last: bool
    queries: Sequences
    keys: Sequences
    heads: Int32
    group: Int32
    batch: Int32
    heads_at_once: Int32
    of_keys: bool = False
    last_tiles: Int32 | None = None
    first_block: Int32 | None = None
    num_blocks: Int32 | None = None

    def balanced(self, spec: ForwardSpec | BackwardSpec, clusters: Int32) -> TileMap:
        """These tiles with a last group of LAST_TILES tiles for each resident cluster, if the call
        is causal and all sequences have one length. Clusters with the last long tiles then leave
        enough short tiles for other clusters."""
        packed = self.divided.cu_seqlens is not None
        if packed or not spec.window_right or spec.window_left:
            return self
        # Where most keys come before the queries, tiles are about as long as one another.
        alike = 2 * self.queries.tokens < self.keys.tokens
        return replace(self, last_tiles=Int32(cutlass.select_(alike, 0, LAST_TILES * clusters)))

    def ordered(self, order: str, clusters: Int32) -> OrderedTileMap:
        """These tiles with an order; see `OrderedTileMap`. The tiles of a group of heads fill the
        clusters about once, so that all clusters end a group at about the same time."""
        blocks = cutlass.max(1, self.blocks(self.divided.tokens))
        fit = clusters // blocks
        fit += Int32(cutlass.select_(10 * fit * blocks < 9 * clusters, 1, 0))
        at_once = Int32(cutlass.max(1, cutlass.min(fit, self.heads * self.batch)))
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"heads_at_once": at_once, "last_tiles": None}
        found = OrderedTileMap(**values, order=order)
        return found.in_halves(clusters) if found.alternates else found

    def in_halves(self, clusters: Int32) -> Self:
        """These tiles of keys of a causal call. Where several query heads share a K/V head, each
        group of heads has about two tiles for each cluster: a long one of the first half of the
        keys, then a short one of the second half. See `uses.HeadsInside`."""
        if self.divided.cu_seqlens is not None:
            return self
        several = self.group > 1
        fit = HALVES * clusters // cutlass.max(1, self.blocks(self.divided.tokens))
        fit = cutlass.max(1, cutlass.min(fit, self.heads * self.batch))
        at_once = Int32(cutlass.select_(several, fit, self.heads_at_once))
        last = 0 if self.last_tiles is None else self.last_tiles
        last = Int32(cutlass.select_(several, 0, last))
        return replace(self, heads_at_once=at_once, last_tiles=last)

    def on_device(self, o: cute.Tensor) -> TileMap:
        """For device code: the tiles of `o`."""
        return self

    @property
    def divided(self) -> Sequences:
        return self.keys if self.of_keys else self.queries

    @property
    def rows_per_token(self) -> int:
        return 1 if self.of_keys else self.packed_heads

    def count(self) -> Int32:
        """The number of tiles; with packed sequences, an upper bound."""
        if self.divided.cu_seqlens is None:
            return self.blocks(self.divided.tokens) * self.heads * self.batch
        return (
            self.divided.tokens * self.rows_per_token // self.tile_size + self.batch
        ) * self.heads

    def blocks(self, tokens: Int32) -> Int32:
        """How many blocks of a sequence are tiles, from its number of tokens."""
        blocks = (tokens * self.rows_per_token + (self.tile_size - 1)) // self.tile_size
        if self.num_blocks is None:
            return blocks
        return cutlass.max(0, cutlass.min(blocks - self.first_block, self.num_blocks))

    def _block(self, within: Int32, blocks: Int32, head: Int32, sequence: Int32) -> Int32:
        """The block at a place in a sequence's order of tiles, from the number of tiles. The head
        counts the heads of all sequences; with packed sequences the head is 0."""
        block = blocks - 1 - within if self.longest_last else within
        return block if self.num_blocks is None else block + self.first_block

    def _length(self, sequence: Int32) -> Int32:
        length = self.divided.length(sequence)
        return length if self.divided.seqused is None else cutlass.max(0, length)

    def locate(self, number: Int32) -> tuple[Boolean, Int32, Int32, Int32]:
        """(whether the tile exists, its block, head and sequence); a whole warp calls this. The
        head counts `heads`."""
        if self.divided.cu_seqlens is None:
            return self._locate_dense(number)
        return self._locate_packed(number)

    def work(self, block: Int32, head: Int32, sequence: Int32) -> Work:
        """The Work of an existing tile."""
        q_start, k_start = self.queries.start(sequence), self.keys.start(sequence)
        if self.of_keys:
            seqlen_q, seqlen_k = self.queries.length(sequence), self._length(sequence)
            kv_head = head
            head = head * self.group // self.packed_heads
        else:
            seqlen_k = self.keys.length(sequence)
            kv_head = head * self.packed_heads // self.group
            seqlen_q = self._length(sequence)
        return Work(block, head, kv_head, sequence, q_start, seqlen_q, k_start, seqlen_k)

    def _locate_dense(self, number: Int32) -> tuple[Boolean, Int32, Int32, Int32]:
        heads, blocks = self.heads, self.blocks(self.divided.tokens)
        group = number // (blocks * self.heads_at_once)
        first = group * self.heads_at_once
        width = cutlass.min(heads * self.batch - first, self.heads_at_once)
        if self.last_tiles is not None:
            last = cutlass.min(heads * self.batch, (self.last_tiles + blocks - 1) // blocks)
            before = heads * self.batch - last
            before -= before % self.heads_at_once
            width = cutlass.select_(first < before, width, heads * self.batch - before)
            first = cutlass.min(first, before)
        within = number - blocks * first
        block = within // width
        head = first + within - block * width
        sequence = head // heads
        block = self._block(block, blocks, head, sequence)
        exists = Boolean(True)
        if self.divided.seqused is not None:
            exists = block * self.tile_size < self._length(sequence) * self.rows_per_token
        return exists, block, head - sequence * heads, sequence

    @cute.jit
    def _locate_packed(self, number: Int32) -> tuple[Boolean, Int32, Int32, Int32]:
        heads = self.heads
        lane = cute.arch.lane_idx()
        first = Int32(0)  # sequence of lane 0
        before = Int32(0)  # tiles of the sequences before it
        sequence = Int32(-1)
        blocks = Int32(0)
        while first < self.batch and sequence < 0:
            lane_blocks = Int32(0)
            if first + lane < self.batch:
                lane_blocks = self.blocks(self._length(first + lane))
            lane_tiles = lane_blocks * heads
            up_to = sums_up_to(lane_tiles)
            holds = cute.arch.vote_ballot_sync(number < before + up_to)
            if holds != 0:
                owner = first_lane(holds)
                sequence = first + owner
                blocks = cute.arch.shuffle_sync(lane_blocks, owner)
                before += cute.arch.shuffle_sync(up_to - lane_tiles, owner)
            else:
                before += cute.arch.shuffle_sync(up_to, WARP_SIZE - 1)
            first += WARP_SIZE
        within = number - before
        block = within // heads
        head = within - block * heads
        block = self._block(block, blocks, Int32(0), sequence)
        return sequence >= 0, block, head, sequence


@dataclass(frozen=True)
class OrderedTileMap(TileMap):
    """Tiles of keys whose CTAs add to sums of query tiles in the order of the tiles' numbers.

    A CTA waits until all tiles of smaller numbers have added to a sum. Waits are rare if each tile
    comes to a sum after the tiles of smaller numbers:

        rising     later blocks have smaller numbers. A CTA begins with the first tile of queries.
                   In a causal call later blocks begin with later tiles, and so are ahead
        falling    earlier blocks have smaller numbers. A CTA begins with the last tile of queries

    Orders, by name:

        rising       all tiles are rising
        alternating  the groups of heads that share L2 alternate, and the last group is falling.
                     In causal calls, CTAs that end a rising group with its shortest tiles begin the
                     next group with its longest tiles. Packed sequences alternate instead of
                     groups. With several query heads of a K/V head, earlier keys have smaller
                     numbers in all groups, and CTAs walk as in `uses.HeadsInside`
        by_head      as alternating with one query head of a K/V head, for any number: a CTA ends a
                     query head before the CTA begins the next one. There are no waits, but CTAs are
                     spread over all heads and queries, so more is read from memory

    Attributes:
        order: the name.
    """

    order: str = "rising"

    @property
    def alternates(self) -> bool:
        return self.order == "alternating"

    def place(self, block: Int32, first: Int32, end: Int32, falls: Boolean) -> Int32:
        """How many of the tiles of keys first to end - 1 add to a sum before a block."""
        return Int32(cutlass.select_(falls, block - first, end - 1 - block))

    def falls(self, head: Int32, sequence: Int32) -> Int32:
        """1 for falling tiles, 0 for rising tiles. The head counts the heads of all sequences."""
        if self.order not in ("alternating", "by_head"):
            return Int32(0)
        several = cutlass.select_(self.group > 1, 1, 0) if self.alternates else 0
        if self.divided.cu_seqlens is not None:
            return Int32((self.batch - sequence) & 1) | several
        last = (self.heads * self.batch - 1) // self.heads_at_once
        return Int32((last - head // self.heads_at_once + 1) & 1) | several

    def falls_of(self, work: Work) -> Int32:
        """`falls` of a work."""
        return self.falls(work.sequence * self.heads + work.kv_head, work.sequence)

    def _block(self, within: Int32, blocks: Int32, head: Int32, sequence: Int32) -> Int32:
        falls = self.falls(head, sequence)
        return Int32(cutlass.select_(falls != 0, within, blocks - 1 - within))


@dataclass(frozen=True)
class SplitTileMap(TileMap):
    """Tiles whose K/V tiles `splits` CTAs or clusters share out; the split is the fast index."""

    splits: Int32 = 1

    def on_device(self, o: cute.Tensor) -> SplitTileMap:
        # The compiler knows that a tensor's sizes are not negative, and makes divisions shorter.
        return replace(self, splits=o.shape[0])

    def count(self) -> Int32:
        return super().count() * self.splits

    def locate(  # type: ignore[override]
        self, number: Int32
    ) -> tuple[Boolean, Int32, Int32, Int32, Int32]:
        """(whether the tile exists, its block, head and sequence, the split)."""
        tile = number // self.splits
        return *super().locate(tile), number - tile * self.splits

    def work(  # type: ignore[override]
        self, block: Int32, head: Int32, sequence: Int32, split: Int32
    ) -> SplitWork:
        own = super().work(block, head, sequence)
        return SplitWork(**vars(own), split=split, splits=self.splits)


def tiles_of_keys(
    a: Any, tile_n: int, row_bytes: int, *, heads: Int32 | None = None, **part: Int32
) -> TileMap:
    """The tiles of tile_n keys of a backward. Each split of a group counts as a K/V head.

    Args:
        a: the kernel's Arguments.
        row_bytes: bytes of a query that tiles reread.
        heads: the number of K/V heads in the call's part; None: all K/V heads.
        part: `first_block` and `num_blocks` of a TileMap.
    """
    queries = Sequences(a.q.shape[-3], a.cu_seqlens_q, a.seqused_q)
    keys = Sequences(a.k.shape[-3], a.cu_seqlens_k, a.seqused_k)
    batch, split_heads = keys.batch(a.k), a.k.shape[-2] * a.num_splits
    group = a.q.shape[-2] // split_heads
    heads = split_heads if heads is None else heads
    head_bytes = Int64(queries.tokens) * row_bytes * group
    return TileMap(
        tile_n, 1, False, queries, keys, heads, group, batch,
        heads_in_l2(head_bytes, heads * batch), of_keys=True, **part,
    )  # fmt: skip
