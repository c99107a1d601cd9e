"""The numbers of the simulator for a GPU with tcgen05, from published rates.

No such GPU has run `bench rates`. What nobody has published is as on the GPU that the rates name
instead.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from .code import Fetch
from .model import Model
from .rates import Rates
from .simulate import WAVEFRONT_BYTES, Machine, TensorCore
from .steps import Product

K_BYTES = 32  # of a row of an operand in a product: 16 elements of 16 bits, 32 of 8
PACKED = ("FFMA2", "FADD2", "FMUL2")


class Blackwell(Model):
    """A model whose products are those of tcgen05: the units of a quarter have no part in them."""

    def clock_mhz(self, multiplying: float) -> float:
        light, most = (
            self.rates.value("launch", "clock", how, "MHz")
            for how in ("light", "while all tensor cores multiply")
        )
        return light + (most - light) * min(1.0, multiplying)

    def launch_us(self, ctas: int) -> float | None:
        return Model(self._measured).launch_us(ctas)

    @cached_property
    def unit_clocks(self) -> dict[str, float]:
        def clocks(what: str) -> float:
            return self.rates.value("arithmetic", what, "on a quarter, published")

        return super().unit_clocks | {
            # Operands and results of a product are in shared and tensor memory.
            "dispatch": 0.0,
            "dispatch xu": 0.0,
            "xu": clocks("ex2"),
            **dict.fromkeys(PACKED, clocks("packed fma")),
            "FMNMX3": clocks("max of three"),
        }

    def fetch(self, beyond: str) -> Fetch:
        return Model(self._measured).fetch(beyond)

    @property
    def _measured(self) -> Rates:
        assert self.rates.otherwise
        return self.rates.otherwise

    def _product(self, item: Product, how: str) -> float:
        """A published number of a product, between two published N in proportion. Kinds with 8-bit
        and smaller elements take as long as 16-bit elements for as many bytes."""
        group = 1 if item.pair is None else 2
        operands = "TS" if item.from_tensor_memory else "SS"
        begin, end = f"tcgen05.mma f16 m{item.m}n", f"k16 {operands} cta_group::{group}"
        known = {
            int(what[len(begin) : -len(end)]): value
            for (part, what, kind, _), value in self.rates.values.items()
            if part == "tcgen05" and kind == how and what.startswith(begin) and what.endswith(end)
        }
        if not known:
            self.rates.value("tcgen05", f"{begin}{item.n}{end}", how)
        below = max((n for n in known if n <= item.n), default=min(known))
        above = min((n for n in known if n >= item.n), default=max(known))
        if below == above:
            return known[below]
        share = (item.n - below) / (above - below)
        return known[below] * (1 - share) + known[above] * share

    def _tensor_core(self) -> TensorCore:
        rates = self.rates
        known: dict[tuple[str, Product], float] = {}

        def remembered(item: Product, how: str) -> float:
            key = how, item._replace(number=0, pair=None if item.pair is None else 0)
            if key not in known:
                known[key] = self._product(item, how)
            return known[key]

        def interval(item: Product) -> float:
            return remembered(item, "interval")

        def moved(what: str, until: str) -> tuple[float, float]:
            """Bytes a clock of a quarter, and clocks besides them."""
            rate = rates.value("tcgen05", what, "bytes a clock and quarter", "bytes a clock")
            return rate, rates.value("tcgen05", what, f"{until}, without its bytes")

        load_rate, load_latency = moved("tcgen05.ld", "until the result")
        store_rate, store_latency = moved("tcgen05.st", "until it is done")
        return TensorCore(
            multiply=interval,
            late=lambda item: remembered(item, "until the result") - interval(item),
            operands=operands,
            load_rate=load_rate,
            load_latency=load_latency,
            store_rate=store_rate,
            store_latency=store_latency,
            copy=lambda nbytes: nbytes / WAVEFRONT_BYTES,
            query=rates.value("launch", "clusterlaunchcontrol.try_cancel", "until the result"),
        )

    def machine(
        self, loading: float, storing: float, memory_share: float, code_from: str | None = None
    ) -> Machine:
        found = super().machine(loading, storing, memory_share, code_from)
        return replace(found, tensor=self._tensor_core())


def operands(item: Product) -> float:
    """Wavefronts of a CTA's shared memory for a product's operands: its rows of A, unless they are
    in tensor memory, and its half of B if a pair multiplies."""
    ctas = 1 if item.pair is None else 2
    rows = item.n / ctas + (0 if item.from_tensor_memory else item.m / ctas)
    return rows * K_BYTES / WAVEFRONT_BYTES
