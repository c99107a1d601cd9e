"""The causal convolution of q, k and v, as the layers have it before the delta rule.

For each channel, with x the call's tensors and 4 taps:

    y_t = silu(bias + w_0 x_(t-3) + w_1 x_(t-2) + w_2 x_(t-1) + w_3 x_t)

A pool holds the inputs of a sequence that the next call needs: the channel's window. The channels
of a slot are those of q, then k, then v.

    load      a thread's channels of the window, of the weights and of the bias, to registers; with
              several tokens to shared memory
    apply     y of a token; the window moves on by the token
    arrive    count this CTA among the CTAs that have read their windows
    store     the window after the call, to the pool

With a slot for each position, and with records, the pool also holds the inputs of drafted tokens.
With a tensor for drafts, the pool stays as it is, and the window after each token goes to another
tensor (`store_draft`).

The CTAs of a group of value heads, and of all tiles of V, read the window of the same channels of q
and k. The CTA that arrives last writes the window, because then no CTA will read it. No CTA waits.
Channels of v belong to one CTA, which writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...common.carried import Carried
from ...common.dtypes import DTYPE
from ...common.ptx.memory import count_arrival
from ..gates import accurate_sigmoid
from ..slots import is_slot
from .spec import CONV_TAPS, DecodeSpec
from .tokens import Fetched, TokenReader, Tokens

PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class ConvPlace(Carried):
    """The pool, and the window of a sequence and head in it.

    Attributes:
        state: `[N, D, W]`, the pool.
        weight: `[D, 4]`.
        bias: `[D]`.
        counter: the number of CTAs that have read this window's channels of q and k; None where the
            pool stays as it is.
        readers: how many CTAs read these channels.
        slot: the sequence's slot.
        first: the window's first position in the slot.
        kept: whether the window is the slot's; otherwise the window is 0.
        heads_qk: number of heads of q.
        arrived: in shared memory, how many CTAs had read the window before this CTA.
        memory: shared memory of the windows, see `Convolution.memory`.
        drafts: `[M, S, D, 3]`, the window after token t of a sequence; any strides.
        draft: the sequence's row of drafts.
        writes_qk: whether this CTA writes the channels of q and k to drafts.
    """

    state: cute.Tensor
    weight: cute.Tensor
    bias: cute.Tensor | None
    counter: cute.Pointer | None
    readers: Int32
    slot: Int32
    first: Int32
    kept: Boolean
    heads_qk: Int32
    arrived: cute.Tensor
    memory: cute.Tensor
    drafts: cute.Tensor | None
    draft: Int32 | None
    writes_qk: Boolean | None


class Window(Carried):
    """A thread's channels of q, k or v, in registers, or in its own part of shared memory."""

    def __init__(self, count: int, memory: cute.Tensor | None, num_threads: int):
        taps, kept = (CONV_TAPS, count), (CONV_TAPS - 1, count)
        if memory is None:
            self.weight = cute.make_rmem_tensor(taps, Float32)
            self.past = cute.make_rmem_tensor(kept, Float32)
            self.bias = cute.make_rmem_tensor((count,), Float32)
            return
        thread, _, _ = cute.arch.thread_idx()
        self.weight = cute.make_tensor(
            (memory.iterator + thread * (CONV_TAPS * count)).align(4 * CONV_TAPS),
            cute.make_layout(taps, stride=(1, CONV_TAPS)),
        )
        rest = cute.domain_offset((CONV_TAPS * count * num_threads + thread,), memory)
        self.past = cute.make_tensor(
            rest.iterator, cute.make_layout(kept, stride=(count * num_threads, num_threads))
        )
        rest = cute.domain_offset(((CONV_TAPS - 1) * count * num_threads,), rest)
        self.bias = cute.make_tensor(
            rest.iterator, cute.make_layout((count,), stride=(num_threads,))
        )

    @staticmethod
    def elements(count: int, num_threads: int) -> int:
        return 2 * CONV_TAPS * count * num_threads


class Windows(Carried):
    """A thread's channels of q, k and v."""

    def __init__(self, reader: TokenReader, memory: cute.Tensor | None):
        offset = 0
        windows = []
        for count in self.counts(reader):
            part = None if memory is None else cute.domain_offset((offset,), memory)
            windows.append(Window(count, part, reader.spec.num_threads))
            offset += Window.elements(count, reader.spec.num_threads)
        self.q, self.k, self.v = windows

    @staticmethod
    def counts(reader: TokenReader) -> tuple[int, int, int]:
        return reader.of_k, reader.of_k, reader.of_v

    @classmethod
    def elements(cls, reader: TokenReader) -> int:
        """Float32 of shared memory for the windows of all threads."""
        threads = reader.spec.num_threads
        return sum(Window.elements(count, threads) for count in cls.counts(reader))


class Convolved(Carried):
    """This thread's share of a token after the convolution; see `Fetched`."""

    def __init__(self, reader: TokenReader, fetched: Fetched):
        self.q, self.k = (cute.make_rmem_tensor((reader.of_k,), Float32) for _ in range(2))
        self.v = cute.make_rmem_tensor((reader.of_v,), Float32)
        self.g, self.beta = fetched.g, fetched.beta


class ConvolvedRecord(Carried):
    """This thread's share of a recorded token, with k after the convolution; see `Fetched`."""

    def __init__(self, reader: TokenReader, fetched: Fetched):
        self.k = cute.make_rmem_tensor((reader.of_k,), Float32)
        self.g, self.u = fetched.g, fetched.u


class Convolution:
    """All methods run on the device."""

    def __init__(self, spec: DecodeSpec, reader: TokenReader):
        self.spec, self.reader = spec, reader
        self.replays = spec.slots == "records"
        # The window also holds what the next call may go back to.
        self.slides = self.replays or spec.slots == "positions"
        self.state_dtype = DTYPE[spec.dtype]

    def memory(self) -> tuple[Any, cute.Layout]:
        """Return dtype and layout of `ConvPlace.memory`. With one token, the layout is part (q or
        k), channel, tap."""
        if self.spec.multi_token:
            return Float32, cute.make_layout((Windows.elements(self.reader),))
        dim, kept = self.spec.head_dim_k, CONV_TAPS - 1
        return self.state_dtype, cute.make_layout((2, dim, kept), stride=(dim * kept, 1, dim))

    def count(self, part: str) -> int:
        """Return how many channels a thread has at most."""
        return self.reader.of_v if part == "v" else self.reader.of_k

    def in_part(self, part: str, i: int) -> tuple[Any, Any]:
        """Return the index of this thread's i-th channel in its head or tile, and whether there is
        such a channel."""
        if part == "v":
            column = self.reader.column(i)
            return column, column >= 0
        channel = self.reader.channel(i)
        return channel, channel < self.spec.head_dim_k

    def first_channel(self, part: str, place: ConvPlace, tokens: Tokens, tile_index: Any) -> Any:
        """Return the channel in the pool of index 0 of `in_part`."""
        spec = self.spec
        if part == "q":
            return tokens.head_qk * spec.head_dim_k
        if part == "k":
            return (place.heads_qk + tokens.head_qk) * spec.head_dim_k
        before = 2 * place.heads_qk * spec.head_dim_k
        return before + tokens.head * spec.head_dim_v + tile_index * spec.tile_v

    @cute.jit
    def load(self, place: ConvPlace, tokens: Tokens, tile_index: Int32) -> Windows:
        """Load a window to registers, or with several tokens to shared memory, because registers
        are more use to the state's tile."""
        windows = Windows(self.reader, place.memory if self.spec.multi_token else None)
        for part in PARTS:
            window = getattr(windows, part)
            first = self.first_channel(part, place, tokens, tile_index)
            for i in cutlass.range_constexpr(self.count(part)):
                index, exists = self.in_part(part, i)
                if exists:
                    channel = first + index
                    self.load_weight(window, i, place, channel)
                    for tap in cutlass.range_constexpr(CONV_TAPS - 1):
                        position = place.first + tap
                        if cutlass.const_expr(self.replays and part == "k"):
                            position = tap  # recorded tokens move this window on to `first`
                        x = Float32(place.state[place.slot, channel, position])
                        x = cutlass.select_(self.is_kept(place, position), x, Float32(0.0))
                        window.past[tap, i] = x
        return windows

    def is_kept(self, place: ConvPlace, position: Any) -> Any:
        """Whether a position of the slot counts. Records are of the sequence in any case."""
        if self.replays:
            return place.kept | (position >= CONV_TAPS - 1)
        return place.kept

    @cute.jit
    def load_weight(
        self, window: Window, i: cutlass.Constexpr, place: ConvPlace, channel: Int32
    ) -> None:
        dtype = DTYPE[self.spec.conv_dtype]
        row = cute.make_tensor(
            (place.weight.iterator + channel * CONV_TAPS).align(CONV_TAPS * dtype.width // 8),
            cute.make_layout((CONV_TAPS,)),
        )
        loaded = cute.make_rmem_tensor((CONV_TAPS,), dtype)
        cute.autovec_copy(row, loaded)
        for tap in cutlass.range_constexpr(CONV_TAPS):
            window.weight[tap, i] = Float32(loaded[tap])
        window.bias[i] = Float32(0.0)
        if cutlass.const_expr(place.bias is not None):
            window.bias[i] = Float32(place.bias[channel])

    @cute.jit
    def apply(self, windows: Windows, fetched: Fetched) -> Convolved:
        """Return q, k and v of the fetched token, and move the windows on."""
        result = Convolved(self.reader, fetched)
        for part in PARTS:
            self.apply_part(part, windows, fetched, result)
        return result

    @cute.jit
    def apply_recorded(self, windows: Windows, fetched: Fetched) -> ConvolvedRecord:
        """Return k of the fetched record, and move its window on. The windows of q and v begin
        after the records."""
        result = ConvolvedRecord(self.reader, fetched)
        self.apply_part("k", windows, fetched, result)
        return result

    @cute.jit
    def apply_part(
        self,
        part: cutlass.Constexpr,
        windows: Windows,
        fetched: Fetched,
        result: Convolved | ConvolvedRecord,
    ) -> None:
        window, x, y = (getattr(of, part) for of in (windows, fetched, result))
        for i in cutlass.range_constexpr(self.count(part)):
            _, exists = self.in_part(part, i)
            if exists:
                new = Float32(x[i])
                total = cute.math.fma(window.weight[CONV_TAPS - 1, i], new, window.bias[i])
                for tap in cutlass.range_constexpr(CONV_TAPS - 1):
                    total = cute.math.fma(window.weight[tap, i], window.past[tap, i], total)
                y[i] = total * accurate_sigmoid(total)
                for tap in cutlass.range_constexpr(CONV_TAPS - 2):
                    window.past[tap, i] = window.past[tap + 1, i]
                window.past[CONV_TAPS - 2, i] = new

    @cute.jit
    def arrive(self, place: ConvPlace) -> None:
        """Count this CTA, after a barrier that follows `load` and `apply`. Another barrier must
        come before `store` or `store_parked`."""
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            place.arrived[0] = count_arrival(place.counter.toint(), place.readers)

    @cute.jit
    def park(
        self,
        windows: Windows,
        place: ConvPlace,
        tokens: Tokens,
        tile_index: Int32,
    ) -> None:
        """Write the window of v to the pool, and the windows of q and k to shared memory, for
        `store_parked`. With one token, registers are more use to the state's tile."""
        for part in PARTS:
            window = getattr(windows, part)
            first = self.first_channel(part, place, tokens, tile_index)
            for i in cutlass.range_constexpr(self.count(part)):
                index, exists = self.in_part(part, i)
                if exists:
                    if cutlass.const_expr(part == "v"):
                        target = place.state[place.slot, first + index, None]
                    else:
                        target = place.memory[PARTS.index(part), index, None]
                    for tap in cutlass.range_constexpr(CONV_TAPS - 1):
                        target[tap] = window.past[tap, i].to(self.state_dtype)

    @cute.jit
    def store_parked(
        self,
        place: ConvPlace,
        tokens: Tokens,
        tile_index: Int32,
    ) -> None:
        """Write the windows of q and k after the call, unless another CTA will."""
        if place.arrived[0] == place.readers - 1:
            for part in PARTS[:2]:
                first = self.first_channel(part, place, tokens, tile_index)
                for i in cutlass.range_constexpr(self.reader.of_k):
                    index, exists = self.in_part(part, i)
                    if exists:
                        window = place.memory[PARTS.index(part), index, None]
                        channel = place.state[place.slot, first + index, None]
                        for tap in cutlass.range_constexpr(CONV_TAPS - 1):
                            channel[tap] = window[tap]

    @cute.jit
    def store(
        self,
        place: ConvPlace,
        windows: Windows,
        tokens: Tokens,
        length: Int32,
        tile_index: Int32,
    ) -> None:
        """Write the window after a call of several tokens, unless another CTA will."""
        is_last = place.arrived[0] == place.readers - 1
        for part in PARTS:
            window = getattr(windows, part)
            first = self.first_channel(part, place, tokens, tile_index)
            for i in cutlass.range_constexpr(self.count(part)):
                index, exists = self.in_part(part, i)
                mine = exists if cutlass.const_expr(part == "v") else exists & is_last
                if mine:
                    channel = place.state[place.slot, first + index, None]
                    if cutlass.const_expr(self.slides):
                        self.slide(channel, place, part, index, tokens, length, tile_index)
                    else:
                        for tap in cutlass.range_constexpr(CONV_TAPS - 1):
                            channel[tap] = window.past[tap, i].to(self.state_dtype)

    @cute.jit
    def store_draft(
        self,
        place: ConvPlace,
        windows: Windows,
        tokens: Tokens,
        i: Int32,
        tile_index: Int32,
    ) -> None:
        """Write the window after the i-th token to the tensor for drafts, or nowhere if there is no
        such row."""
        drafts = place.drafts
        if is_slot(place.draft, drafts, False) and i < drafts.shape[1]:
            for part in PARTS:
                window = getattr(windows, part)
                first = self.first_channel(part, place, tokens, tile_index)
                for n in cutlass.range_constexpr(self.count(part)):
                    index, exists = self.in_part(part, n)
                    mine = exists if cutlass.const_expr(part == "v") else exists & place.writes_qk
                    if mine:
                        target = drafts[place.draft, i, first + index, None]
                        for tap in cutlass.range_constexpr(CONV_TAPS - 1):
                            target[tap] = window.past[tap, n].to(self.state_dtype)

    @cute.jit
    def slide(
        self,
        channel: cute.Tensor,
        place: ConvPlace,
        part: cutlass.Constexpr,
        index: Int32,
        tokens: Tokens,
        length: Int32,
        tile_index: Int32,
    ) -> None:
        """Write the window that the call's tokens began with, and the call's inputs. The next call
        goes on at the input that was accepted last. With positions, at least one was accepted, and
        the window's first input is left out."""
        skipped = 0 if self.replays else 1
        kept = CONV_TAPS - 1 - skipped
        zero = self.state_dtype(0.0)
        before = [channel[place.first + skipped + tap] for tap in range(kept)]
        for tap in cutlass.range_constexpr(kept):
            is_kept = self.is_kept(place, place.first + skipped + tap)
            channel[tap] = cutlass.select_(is_kept, before[tap], zero)
        for t in cutlass.range(cutlass.min(length, channel.shape[0] - kept), unroll=1):
            if cutlass.const_expr(part == "v"):
                row = tokens.v[tokens.batch, tokens.start + t, tokens.head, None]
                channel[kept + t] = row[tile_index * self.spec.tile_v + index]
            else:
                x = tokens.q if cutlass.const_expr(part == "q") else tokens.k
                channel[kept + t] = x[tokens.batch, tokens.start + t, tokens.head_qk, index]
