"""Tiles to copy, calls of the kernels, and the sums that they must return.

Each thread returns a checksum of all words that it read, in order, or exact sums of MMAs. This
module computes the checksum and the sums from the source and from the place where each 16-byte unit
of a tile belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...kernels.async_copy.spec import (
    ELEMENT_BYTES,
    VECTOR_WORDS,
    AsyncCopySpec,
)
from ...kernels.common.spec import VECTOR_BYTES, WARP_SIZE

if TYPE_CHECKING:
    import torch

FACTOR = 0x9E3779B1  # the checksum's factor, as in `kernels/async_copy/work.py`
SWIZZLE_UNITS = 8  # 16-byte units of a swizzled row of a box
LARGEST_INTEGER = 8  # the largest element of tiles that are multiplied
WORDS_AT_ONCE = 2**26  # the size of an intermediate result


class WrongTiles(AssertionError):
    """The sums show that a tile was not copied, or was copied to a wrong place."""


@dataclass(frozen=True)
class Tiles:
    """The distribution of tiles over CTAs.

    Attributes:
        ctas: the number of CTAs, one on each SM.
        tiles: different tiles in memory.
        count: tiles that a CTA copies.
        sharing: CTAs that copy the same tiles; with multicast, the CTAs of a cluster.
    """

    ctas: int
    tiles: int
    count: int
    sharing: int = 1

    def check(self, spec: AsyncCopySpec) -> None:
        """Raise ValueError if the kernel of `spec` cannot copy these tiles."""
        step = self.ctas // self.sharing * spec.turns
        if self.ctas % self.sharing or self.tiles < step or self.count < 1:
            raise ValueError(f"{self}: needs whole groups of CTAs, at least {step} tiles")
        if self.sharing % spec.cluster:
            raise ValueError(f"sharing is {self.sharing}, must be a multiple of {spec.cluster}")


def make_memory(nbytes: int, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Flat memory to take tiles from, float16: random "bits", or small "integers" for products."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)

    def random(low: int, high: int) -> torch.Tensor:
        size = nbytes // ELEMENT_BYTES
        return torch.randint(
            low, high, (size,), dtype=torch.int16, device=device, generator=generator
        )

    return {
        "bits": random(-(2**15), 2**15).view(torch.float16),
        "integers": random(-LARGEST_INTEGER, LARGEST_INTEGER + 1).to(torch.float16),
    }


def source_of(memory: dict[str, torch.Tensor], spec: AsyncCopySpec, tiles: int) -> torch.Tensor:
    """The first `tiles` tiles of memory, `[rows, heads * tile_columns]`.

    Raises:
        ValueError: `tiles` is not a multiple of the heads, or more than the memory has.
    """
    flat = memory["integers" if spec.products else "bits"]
    elements = tiles * spec.tile_bytes // ELEMENT_BYTES
    if tiles % spec.heads or elements > flat.numel():
        raise ValueError(
            f"{tiles} tiles of {spec.tile_bytes} bytes: must be a multiple of {spec.heads} heads, "
            f"and fit {flat.nbytes} bytes"
        )
    return flat[:elements].view(-1, spec.heads * spec.tile_columns)


def launch(
    function: Callable[..., object], spec: AsyncCopySpec, source: torch.Tensor, how: Tiles
) -> tuple[Callable[[], object], torch.Tensor, torch.Tensor]:
    """A call of the kernel, and the sums and clocks that it writes."""
    import torch

    how.check(spec)
    shape = (how.ctas, spec.consumer_threads, VECTOR_WORDS)
    sums = torch.full(shape, -1, dtype=torch.int32, device=source.device)
    clocks = torch.full((how.ctas,), -1, dtype=torch.int64, device=source.device)
    arguments = (source, sums, clocks, how.tiles, how.count, how.sharing)
    return lambda: function(*arguments), sums, clocks


def compare(spec: AsyncCopySpec, how: Tiles, sums: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise `WrongTiles` unless the sums match the tiles that each CTA had to copy."""
    import torch

    if not torch.equal(sums, expected):
        wrong = (sums != expected).flatten(1).any(1).nonzero().flatten().tolist()
        raise WrongTiles(f"{spec}, {how}: wrong sums of CTAs {wrong[:8]}, {len(wrong)} in all")


def expected_sums(spec: AsyncCopySpec, source: torch.Tensor, how: Tiles) -> torch.Tensor:
    """The sums that the kernel must return: int32 (CTAs, consumer threads, 4)."""
    import torch

    streams = how.ctas // how.sharing
    n = torch.arange(how.count, device=source.device)[:, None]
    places = (torch.arange(streams, device=source.device) + n * streams) % how.tiles
    if spec.copy == "none":
        places = places[n.flatten() % spec.num_stages]
    of_tiles = _products(spec, source) if spec.products else _checksums(spec, source)
    # (tiles, vectors that differ from tile to tile, threads, words)
    vector = (n % of_tiles.shape[1]).expand(-1, streams)
    total = torch.zeros((streams, *of_tiles.shape[2:]), dtype=torch.int32, device=source.device)
    vectors = spec.vectors if spec.whole_tile else 1
    factor = 1 if spec.products else pow(FACTOR, vectors, 2**32)
    at_once = max(1, WORDS_AT_ONCE // total.numel())
    for first in range(0, how.count, at_once):
        some = of_tiles[places[first : first + at_once], vector[first : first + at_once]]
        weights = _powers(factor, len(some), source.device)[:, None, None, None]
        scale = _signed(pow(factor, len(some), 2**32))
        total = total * scale + (some * weights).sum(0, dtype=torch.int32)
    return total.repeat_interleave(how.sharing, 0)


def checksums_of_reads(words: torch.Tensor, threads: int, count: int) -> torch.Tensor:
    """Return int32 (threads, 4), the sums that each thread of `plain_read` must return, if it reads
    `count` vectors of `words`, (vectors, 4)."""
    import torch

    total = torch.zeros((threads, words.shape[1]), dtype=torch.int32, device=words.device)
    thread = torch.arange(threads, device=words.device)
    for n in range(count):
        total = total * _signed(FACTOR) + words[(thread + n * threads) % len(words)]
    return total


def _checksums(spec: AsyncCopySpec, source: torch.Tensor) -> torch.Tensor:
    """Return int32 (tiles, 1, threads, words), the checksum of each tile alone; or with a vector a
    tile, (tiles, vectors, threads, words)."""
    import torch

    flat = in_shared_memory(spec, source).view(torch.int32)
    words: torch.Tensor = flat.unflatten(1, (spec.vectors, spec.consumer_threads, VECTOR_WORDS))
    if not spec.whole_tile:
        return words
    weights = _powers(FACTOR, spec.vectors, source.device)[:, None, None]
    return (words * weights).sum(1, keepdim=True, dtype=torch.int32)


def _products(spec: AsyncCopySpec, source: torch.Tensor) -> torch.Tensor:
    """Return int32 (tiles, 1, threads, 4), the sum over all accumulators of a thread, for each
    element of a fragment."""
    import torch

    x = in_shared_memory(spec, source).view(torch.float16).to(torch.int32)
    # Each warp multiplies values that its own lanes read; four lanes hold a column of a right
    # operand.
    shape = (spec.vectors, spec.consumer_warps, WARP_SIZE // 4, 4 * VECTOR_BYTES // ELEMENT_BYTES)
    columns: torch.Tensor = x.unflatten(1, shape).sum((1, 4), dtype=torch.int32)
    scale = spec.products * (spec.products + 1) // 2
    lanes = torch.arange(WARP_SIZE, device=source.device)
    first = 2 * (lanes % 4)
    pairs = torch.stack([columns[:, :, first], columns[:, :, first + 1]], -1) * scale
    return pairs.repeat(1, 1, 1, 2).flatten(1, 2)[:, None]


def in_shared_memory(spec: AsyncCopySpec, source: torch.Tensor) -> torch.Tensor:
    """The bytes of each tile as they must lie in shared memory: int16 (tiles, elements)."""
    import torch

    rows, columns = spec.tile_rows, spec.tile_columns
    boxes = columns // spec.box_columns
    x: torch.Tensor = source.view(torch.int16)
    x = x.unflatten(0, (-1, rows)).unflatten(2, (spec.heads, boxes, -1))
    x = x.permute(0, 2, 3, 1, 4).flatten(0, 1)  # tiles, boxes, rows, columns of a box
    if spec.copy in ("tensor_swizzled", "multicast"):
        units = x.unflatten(3, (SWIZZLE_UNITS, -1))
        unit = torch.arange(SWIZZLE_UNITS, device=x.device)
        row = torch.arange(rows, device=x.device)[:, None]
        index = (unit ^ (row % SWIZZLE_UNITS))[None, None, :, :, None].expand_as(units)
        x = units.gather(3, index).flatten(3)
    return x.flatten(1).contiguous()


def _powers(factor: int, count: int, device: torch.device) -> torch.Tensor:
    """factor ** (count - 1) ... factor ** 0, modulo 2 ** 32, as int32."""
    import torch

    powers = [1]
    for _ in range(count - 1):
        powers.append(powers[-1] * factor % 2**32)
    return torch.tensor([_signed(x) for x in reversed(powers)], dtype=torch.int32, device=device)


def _signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x
