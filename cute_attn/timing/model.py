"""The numbers of the simulator, from a GPU's measured rates."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from .code import HELD_LINES, STARTED_LINES, Fetch
from .costs import CODE_LINE
from .rates import Rates
from .simulate import Machine
from .steps import Latencies

QUARTER = "on a quarter"
RESULT = "until the result"
FIRST_KIB = 128  # of code that has no branch, whose first pass is measured
BEYOND_KIB = {"SM": 64, "L2": 160}  # of passes that find code at these places
JUMP_BYTES = 256  # of code from jump to jump
HELD_CODE = HELD_LINES * CODE_LINE
OPERAND_ROW, WAVEFRONT = 32, 128  # bytes of 16 operands of a row, and of all banks
ROWS = 64  # of A in a wgmma
STORED = 1024, 8192  # bytes of bulk stores

# Clocks that a micro-benchmark's own instructions take in this model, besides what it measures.
OWN = {"hand-over": 32.0, "named barrier": 10.0, "product": 28.0}


@dataclass(frozen=True)
class Model:
    """What the simulator needs to know of a GPU."""

    rates: Rates

    def clock_mhz(self, multiplying: float) -> float:
        """The clock while this share of all tensor cores is busy: between the clock of copies, and
        the clock while all multiply."""
        how = "64 KiB in flight, 1 SMs"
        gbps, per_clock = (
            self.rates.value("copies", "bulk load from L2", how, unit)
            for unit in ("GB/s", "bytes a clock and SM")
        )
        light = 1e3 * gbps / per_clock
        most = self.rates.value("launch", "clock during products", "after a rest, short", "MHz")
        return light + (most - light) * min(1.0, multiplying)

    def launch_us(self, ctas: int) -> float | None:
        """Microseconds that the profiler gives an empty kernel of so many CTAs, between one and as
        many as SMs in proportion; None if nobody has measured it."""
        found: dict[int, list[float]] = {}
        for (how, _), us in self.rates.all_of("launch", "empty kernel, profiled").items():
            if "after" not in how:
                found.setdefault(int(how.split()[0]), []).append(us)
        if not found:
            return None
        few, many = (statistics.median(found[n]) for n in (min(found), max(found)))
        share = (min(ctas, max(found)) - 1) / max(1, max(found) - 1)
        return few + share * (many - few)

    @cached_property
    def unmeasured(self) -> tuple[str, ...]:
        """What a prediction leaves out, because the GPU's report does not have it."""
        return () if self.launch_us(1) is not None else ("the launch",)

    @cached_property
    def unit_clocks(self) -> dict[str, float]:
        """Clocks of a warp's instruction on a unit of its quarter."""

        def clocks(what: str) -> float:
            values = self.rates.all_of("arithmetic", what)
            return min(v for (how, _), v in values.items() if how.startswith(QUARTER))

        return {
            "dispatch": self._dispatch("logic"),
            "dispatch xu": self._dispatch("ex2"),
            "fma": clocks("fma"),
            "alu": clocks("logic"),
            "xu": clocks("ex2"),
            "mma": self.rates.value("mma", "m16n8k16 bf16", "on a quarter, 2 warps"),
            "imad": clocks("int_mad"),
            "FMNMX": clocks("max"),
            "F2FP": clocks("pack_bf16x2"),
            "I2FP": clocks("from_int"),
            "SEL": clocks("select"),
            "PRMT": clocks("permute"),
            "HFMA2": clocks("fma_bf16x2"),
        }

    def _dispatch(self, kind: str) -> float:
        """Clocks for which an instruction keeps the tensor cores of its quarter from working, since
        both need the same port."""
        stall = "stall for an instruction of a quarter"
        return self.rates.value("beside", f"m64n256k16 beside {kind}", stall)

    @cached_property
    def latencies(self) -> Latencies:
        def clocks(part: str, what: str) -> float:
            return self.rates.value(part, what, RESULT)

        return Latencies(
            arithmetic=clocks("arithmetic", "fma"),
            special=clocks("arithmetic", "ex2"),
            shuffle=clocks("arithmetic", "shuffle"),
            mma=clocks("mma", "m16n8k16 bf16"),
            shared=clocks("shared", "load 4 B"),
            matrix=clocks("shared", "ldmatrix x1"),
            from_l2=clocks("memory", "load from L2"),
            from_memory=clocks("memory", "load from memory"),
        )

    def multiply(self, n: int, from_registers: bool) -> float:
        """Clocks of a wgmma while others follow: measured, between measured N in proportion."""
        operands = "RS" if from_registers else "SS"
        known = {
            int(what[len("m64n") : what.index("k16")]): clocks
            for (part, what, how, unit), clocks in self.rates.values.items()
            if part == "mma" and what.endswith(operands) and how == "interval, 1 warpgroups"
        }
        below = max((k for k in known if k <= n), default=min(known))
        above = min((k for k in known if k >= n), default=max(known))
        if below == above:
            return known[below] * n / below
        share = (n - below) / (above - below)
        return known[below] * (1 - share) + known[above] * share

    def multiply_latency(self, from_registers: bool) -> float:
        """Clocks from the end of a wgmma's interval until a warp sees the result."""
        n = 128
        operands = "RS" if from_registers else "SS"
        alone = self.rates.value("mma", f"m64n{n}k16 {operands}", RESULT)
        return max(0.0, alone - self.multiply(n, from_registers) - OWN["product"])

    def operands(self, n: int, from_registers: bool) -> float:
        """Wavefronts of shared memory for a product's operands."""
        return (n + (0 if from_registers else ROWS)) * OPERAND_ROW / WAVEFRONT

    def fetch(self, beyond: str) -> Fetch:
        """What fetching machine code takes, if lines that the SM lacks come from `beyond`."""
        rates = self.rates

        def again(what: str, kib: int) -> float:
            """Clocks of a pass, for each line or jump."""
            pieces = kib * 1024 // (CODE_LINE if what == "code" else JUMP_BYTES)
            how = f"{kib} KiB, 4 warps, {rates.sms} SMs"
            return rates.value("code", f"{what}, again", how) / pieces

        lines_of_a_jump = JUMP_BYTES // CODE_LINE
        line = {level: again("code", kib) for level, kib in BEYOND_KIB.items()}
        jump = {
            level: max(0.0, again("code with jumps", kib) - lines_of_a_jump * line[level])
            for level, kib in BEYOND_KIB.items()
        }
        how = f"{FIRST_KIB} KiB, 4 warps, {rates.sms} SMs"
        first = rates.value("code", "code, first from memory", how)
        lines = FIRST_KIB * 1024 // CODE_LINE - STARTED_LINES
        line["memory"], jump["memory"] = line["SM"] + first / lines, jump["L2"]
        return Fetch(line, jump, beyond)

    def meet(self, warps: int) -> float:
        """Clocks of a named barrier: measured for a few numbers of warps, which lie on a line."""
        few, many = (
            self.rates.value("barriers", "bar.sync of all warps", f"{n} warps") for n in (4, 12)
        )
        return max(0.0, few + (many - few) / 8 * (warps - 4) - OWN["named barrier"])

    @cached_property
    def fence(self) -> float:
        """Clocks of a fence.proxy.async behind stores to shared memory."""
        stores = "4 stmatrix x4"
        with_fence, without = (
            self.rates.value("chain", f"{stores}, {rest}", "4 warps")
            for rest in ("fence.proxy.async, bar.sync", "bar.sync")
        )
        return with_fence - without

    @cached_property
    def cluster_fence(self) -> float:
        """Clocks of the fence in a cluster's barrier."""
        what = "barrier of all warps"
        return self.rates.value("barriers", what, "4 warps of 2 CTAs") - self.meet(8)

    @cached_property
    def store_latency(self) -> float:
        """Clocks until a bulk store has read, besides the time that its bytes take."""
        small, large = (
            self.rates.value("chain", f"bulk store of {n} bytes, until read", "4 warps")
            for n in STORED
        )
        each = (large - small) / (STORED[1] - STORED[0])
        return max(0.0, small - STORED[0] * each - OWN["product"])

    def shared_rate(self, what: str, sms: float) -> float:
        """Bytes a clock of an SM while so many SMs do the same: measured for a few numbers."""
        unit = "bytes a clock and SM"
        points: dict[int, float] = {}
        for (how, u), value in self.rates.all_of("sharing", what).items():
            if u == unit and "the same" not in how:
                count = int(how.split()[-2])
                points[count] = max(points.get(count, 0.0), value)
        below = max((n for n in points if n <= sms), default=min(points))
        above = min((n for n in points if n >= sms), default=max(points))
        if below == above:
            return points[below]
        # The sum of all SMs' rates is nearly linear between two points.
        share = (sms - below) / (above - below)
        total = below * points[below] * (1 - share) + above * points[above] * share
        return total / sms

    def machine(
        self, loading: float, storing: float, memory_share: float, code_from: str | None = None
    ) -> Machine:
        """The SM that has the most to do, of `loading` and `storing` SMs like it, which share the
        rates of L2 and memory. Memory is read for `memory_share` of the bytes that an SM waits
        for. Code that the SM does not hold comes from `code_from`."""
        rates = self.rates

        def latency(level: str) -> float:
            values = rates.all_of("copies", f"bulk load from {level}")
            return values["16 bytes alone", "clocks"]

        shared = {"L2": self.shared_rate("bulk load from L2", loading)}
        # Memory gives its rate to those that miss, as if so many fewer SMs asked.
        fewer = max(1.0, loading * memory_share)
        shared["memory"] = min(self.shared_rate("bulk load from memory", fewer), shared["L2"])
        known: dict[tuple[int, bool], float] = {}

        def multiply(n: int, from_registers: bool) -> float:
            key = n, from_registers
            if key not in known:
                known[key] = self.multiply(n, from_registers)
            return known[key]

        barrier = "mbarrier, two hand-overs between two warps"
        hand_over = rates.value("barriers", barrier, "2 warps") / 2 - OWN["hand-over"]
        return Machine(
            multiply=multiply,
            multiply_latency=self.multiply_latency,
            hand_over=hand_over,
            meet=self.meet,
            # Measured until a warp goes on, which the simulator adds.
            l2_latency=latency("L2") - hand_over,
            memory_latency=latency("memory") - hand_over,
            l2_rate=shared["L2"],
            memory_rate=shared["memory"],
            store_rate=self.shared_rate("bulk store to L2", storing),
            add_rate=self.shared_rate("bulk add to L2", storing),
            store_latency=self.store_latency,
            wavefront=rates.value("shared", "store 4 B", "16 warps"),
            operands=self.operands,
            fence=self.fence,
            cluster_fence=self.cluster_fence,
            fetch=self.fetch(code_from or "L2"),
            holds_code=code_from is None,
        )
