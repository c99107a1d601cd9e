"""Decode of KDA and the Gated Delta Net: what tests draw, run and compare, on a GPU or emulated.

The rule for errors is that of `lightning_cases`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

import cute_attn
from cute_attn.ops.gated_delta_rule import plan_gated_delta_rule_decode
from cute_attn.ops.kda.decode import plan_kda_decode
from cute_attn.reference.gated_delta_rule import gated_delta_rule_decode_reference
from cute_attn.reference.kda import KdaRecords, kda_decode_reference
from tests.sweeps import FULL

from .lightning_cases import assert_no_worse

HEAD_DIMS = (64, 128, 256)
HEAD_DIMS_V = (64, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16)
RECORDS = ("record_k", "record_g", "record_u")
POOLS = (*RECORDS, "conv_state", "draft_states", "draft_windows")  # besides the states'
TAPS = 4


@dataclass(frozen=True)
class Kernel:
    """What is compiled in."""

    head_dim_k: int = 128
    head_dim_v: int = 128
    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype = torch.bfloat16
    beta_dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype = torch.float32
    state_v_first: bool = True
    gate: str = "softplus"
    has_A_log: bool = True
    dt_bias_dims: int = 1
    l2norm: bool = True
    beta_sigmoid: bool = True
    multi_token: bool = False
    # "batch", "indexed", "positions", "records", "own records" and "drafts"
    slots: str = "indexed"
    accepted: bool = True  # of "positions"
    decays: str = "channel"  # "head" is the Gated Delta Net
    conv_dtype: torch.dtype | None = None  # of the convolution's weights
    conv_bias: bool = False

    @property
    def sensible(self) -> bool:
        """Whether there is such a kernel, and it differs from those with other fields."""
        gated = self.gate != "none"
        return (
            (self.has_A_log or self.gate == "lower_bound")
            and (gated or (self.dt_bias_dims == 0 and not self.has_A_log))
            and (self.parameter_dtype == torch.float32 or self.has_A_log or self.dt_bias_dims > 0)
            and (self.multi_token or self.slots in ("batch", "indexed"))
            and (self.accepted or self.slots == "positions")
            and (self.decays == "channel" or self.dt_bias_dims < 2)
            and (self.conv_dtype is not None or not self.conv_bias)
        )

    @property
    def named_slots(self) -> bool:
        """Whether calls have state_indices."""
        return self.slots in ("indexed", "positions", "records", "drafts")

    def plan(self, arch: str) -> list[Any]:
        name = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
        plan: Any = plan_kda_decode
        more: dict[str, Any] = {"dt_bias_dims": self.dt_bias_dims}
        if self.decays == "head":
            plan, more = plan_gated_delta_rule_decode, {}
        return plan(  # type: ignore[no-any-return]
            arch,
            dtype=name[self.dtype],
            gate_dtype=name[self.gate_dtype],
            beta_dtype=name[self.beta_dtype],
            state_dtype=name[self.state_dtype],
            A_log_dtype=name[self.parameter_dtype] if self.has_A_log else "none",
            dt_bias_dtype=name[self.parameter_dtype] if self.dt_bias_dims else "none",
            head_dim_k=self.head_dim_k,
            head_dim_v=self.head_dim_v,
            state_v_first=self.state_v_first,
            lower_bound=self.gate == "lower_bound",
            use_qk_l2norm_in_kernel=self.l2norm,
            use_gate_in_kernel=self.gate != "none",
            use_beta_sigmoid_in_kernel=self.beta_sigmoid,
            multi_token=self.multi_token,
            slots="records" if "records" in self.slots else self.slots,
            indexed=self.named_slots,
            accepted=self.accepted,
            conv_dtype="none" if self.conv_dtype is None else name[self.conv_dtype],
            conv_bias=self.conv_bias,
            **more,
        )


VALUES: dict[str, tuple[Any, ...]] = {
    "head_dim_k": HEAD_DIMS,
    "head_dim_v": HEAD_DIMS_V,
    "dtype": DTYPES,
    "gate_dtype": DTYPES,
    "beta_dtype": DTYPES,
    "state_dtype": STATE_DTYPES,
    "parameter_dtype": STATE_DTYPES,
    "state_v_first": (True, False),
    "gate": ("softplus", "lower_bound", "none"),
    "has_A_log": (True, False),
    "dt_bias_dims": (1, 2, 0),
    "l2norm": (True, False),
    "beta_sigmoid": (True, False),
    "multi_token": (False, True),
    "slots": ("batch", "indexed", "positions", "records", "own records", "drafts"),
    "accepted": (True, False),
    "decays": ("channel", "head"),
    "conv_dtype": (None, torch.bfloat16, torch.float32),
    "conv_bias": (False, True),
}
# What KDA's own tests draw.
KDA: dict[str, Any] = {"decays": "channel", "conv_dtype": None, "conv_bias": False}
assert set(VALUES) == {field.name for field in fields(Kernel)}


def sample(count: int, seed: int, **fixed: Any) -> list[Kernel]:
    """Kernels with every value of every field, where `count` allows for it."""
    rng = random.Random(seed)
    turns = {name: list(values) for name, values in VALUES.items()}
    found: list[Kernel] = []
    while len(found) < count:
        # Of a few random ones, the one whose values have been used least.
        few = []
        while len(few) < 20:
            kernel = Kernel(**{name: rng.choice(v) for name, v in turns.items()} | fixed)
            if kernel.sensible:
                few.append(kernel)

        def uses(kernel: Kernel) -> int:
            return sum(
                getattr(kernel, name) == getattr(other, name) for name in turns for other in found
            )

        found.append(min(few, key=uses))
    return found


POSITIONS = Kernel(64, 64, multi_token=True, slots="positions")
WITH_RECORDS = Kernel(64, 64, multi_token=True, slots="records")
NO_GATE = Kernel(
    128, 64, gate="none", has_A_log=False, dt_bias_dims=0, multi_token=True, beta_sigmoid=False
)
# What the emulator is given: fewer kernels to compile, and smaller states.
EMULATED = [
    Kernel(64, 64),
    Kernel(
        128,
        64,
        beta_dtype=torch.float32,
        parameter_dtype=torch.bfloat16,
        state_v_first=False,
        gate="lower_bound",
        dt_bias_dims=2,
    ),
    Kernel(128, 128, torch.float32, state_dtype=torch.bfloat16, slots="batch", l2norm=False),
    Kernel(64, 64, torch.float16, gate_dtype=torch.float32, multi_token=True, slots="batch"),
    POSITIONS,
    WITH_RECORDS,
    NO_GATE,
    Kernel(
        64,
        64,
        torch.float32,
        torch.float16,
        torch.float16,
        torch.bfloat16,
        state_v_first=False,
        multi_token=True,
        slots="own records",
    ),
    Kernel(
        64,
        64,
        state_v_first=False,
        gate="lower_bound",
        has_A_log=False,
        dt_bias_dims=0,
        multi_token=True,
        slots="positions",
        accepted=False,
    ),
    Kernel(256, 64, gate="lower_bound", dt_bias_dims=0),
]
# What a GPU is given: every value of every field, and what some tests ask for together.
SOME = [
    *EMULATED,
    Kernel(64, 128, multi_token=True, slots="positions", parameter_dtype=torch.bfloat16),
    replace(WITH_RECORDS, beta_dtype=torch.float32),
    replace(WITH_RECORDS, head_dim_k=256, state_dtype=torch.bfloat16, state_v_first=False),
    *sample(12, seed=0, **KDA),
]
# The Gated Delta Net, and both with a convolution.
GATED_DELTA_RULE = [
    Kernel(64, 64, decays="head"),
    Kernel(64, 64, decays="head", conv_dtype=torch.bfloat16, conv_bias=True),
    Kernel(64, 64, decays="head", multi_token=True, slots="positions", conv_dtype=torch.bfloat16),
    Kernel(64, 64, decays="head", multi_token=True, slots="records", gate_dtype=torch.float32),
    Kernel(
        128,
        64,
        torch.float16,
        parameter_dtype=torch.bfloat16,
        state_dtype=torch.bfloat16,
        state_v_first=False,
        decays="head",
        multi_token=True,
        slots="batch",
        conv_dtype=torch.float32,
    ),
    Kernel(
        64,
        128,
        torch.float32,
        decays="head",
        gate="none",
        has_A_log=False,
        dt_bias_dims=0,
        l2norm=False,
        beta_sigmoid=False,
    ),
    Kernel(128, 128, slots="batch", conv_dtype=torch.bfloat16),  # KDA
    Kernel(64, 64, multi_token=True, slots="positions", conv_dtype=torch.float16, conv_bias=True),
    # Drafts with a convolution.
    Kernel(64, 64, decays="head", multi_token=True, slots="drafts", conv_dtype=torch.bfloat16),
    Kernel(64, 64, decays="head", multi_token=True, slots="records", conv_dtype=torch.bfloat16),
    # V is no power of two.
    Kernel(64, 192, decays="head", conv_dtype=torch.bfloat16),
    Kernel(
        64,
        192,
        state_dtype=torch.bfloat16,
        state_v_first=False,
        decays="head",
        multi_token=True,
        slots="positions",
    ),
    Kernel(128, 192, decays="head", multi_token=True, slots="drafts", conv_dtype=torch.bfloat16),
    Kernel(128, 192, multi_token=True, slots="records"),
    Kernel(
        64,
        128,
        state_v_first=False,
        multi_token=True,
        slots="own records",
        conv_dtype=torch.float32,
        conv_bias=True,
    ),
    Kernel(
        64,
        64,
        torch.float16,
        state_dtype=torch.bfloat16,
        multi_token=True,
        slots="drafts",
        conv_dtype=torch.float32,
        conv_bias=True,
    ),
]


class Result(NamedTuple):
    """The output, and what the call has written to."""

    o: torch.Tensor
    state: torch.Tensor
    record_k: torch.Tensor | None = None
    record_g: torch.Tensor | None = None
    record_u: torch.Tensor | None = None
    conv_state: torch.Tensor | None = None
    draft_states: torch.Tensor | None = None
    draft_windows: torch.Tensor | None = None


@dataclass(frozen=True)
class Case:
    """What hypothesis draws."""

    kernel: Kernel = Kernel()
    batch: int = 3
    tokens: int = 1
    heads: int = 1
    group: int = 2
    spare_slots: int = 2
    padded: int = 0  # how many sequences are padding
    speculated: int = 4  # S
    packing: str = "separate"  # of q, k, v, g and beta: "separate", "packed" or "misaligned"
    strided_state: bool = False
    neg_eigval: bool = False
    give_out: bool = True
    scale: float | None = None
    spread: float = 1.0  # of g
    rate: float = 0.0  # A_log is about this
    seed: int = 0

    @property
    def heads_v(self) -> int:
        return self.heads * self.group

    def inputs(self, device: str = "cuda") -> dict[str, Any]:
        kernel, heads, heads_v = self.kernel, self.heads, self.heads_v
        dim_k, dim_v = kernel.head_dim_k, kernel.head_dim_v
        generator = torch.Generator(device).manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        step = (self.batch, self.tokens) if kernel.multi_token else (self.batch,)
        parts = {
            "q": (normal(*step, heads, dim_k), kernel.dtype),
            "k": (normal(*step, heads, dim_k), kernel.dtype),
            "v": (normal(*step, heads_v, dim_v), kernel.dtype),
            "g": (self.gates(normal(*step, *self.gates_of_step)), kernel.gate_dtype),
            "beta": (normal(*step, heads_v), kernel.beta_dtype),
        }
        if not kernel.l2norm:  # lest the state grows
            for name in ("q", "k"):
                x, dtype = parts[name]
                parts[name] = torch.nn.functional.normalize(x, dim=-1), dtype
        if not kernel.beta_sigmoid:
            parts["beta"] = parts["beta"][0].sigmoid(), kernel.beta_dtype
        args: dict[str, Any] = {name: x.to(dtype) for name, (x, dtype) in parts.items()}
        if self.packing != "separate":
            args = packed(args, 1 if self.packing == "misaligned" else 8)

        slots = self.slots
        matrix = (dim_v, dim_k) if kernel.state_v_first else (dim_k, dim_v)
        state = normal(slots, heads_v + int(self.strided_state), *matrix).to(kernel.state_dtype)
        if kernel.gate != "none":
            dims = 1 if kernel.decays == "head" else dim_k
            of_gate = {"A_log": (heads_v,), "dt_bias": (heads_v * dims,)}
            if kernel.dt_bias_dims == 2:
                of_gate["dt_bias"] = (heads_v, dim_k)
            if kernel.has_A_log:
                A_log = self.rate + 0.5 * normal(*of_gate["A_log"])
                args["A_log"] = A_log.to(kernel.parameter_dtype)
            if kernel.dt_bias_dims:
                args["dt_bias"] = normal(*of_gate["dt_bias"]).to(kernel.parameter_dtype)
            if kernel.gate == "lower_bound":
                args["lower_bound"] = -5.0
        args |= {
            "state": state[:, :heads_v],
            "scale": self.scale,
            "use_qk_l2norm_in_kernel": kernel.l2norm,
            "use_gate_in_kernel": kernel.gate != "none",
            "use_beta_sigmoid_in_kernel": kernel.beta_sigmoid,
            "allow_neg_eigval": self.neg_eigval and kernel.beta_sigmoid,
            "state_v_first": kernel.state_v_first,
        }
        if kernel.named_slots:
            width = 1 + self.speculated if kernel.slots == "positions" else 1
            indices = torch.randperm(slots, generator=generator, device=device)
            indices = indices[: self.batch * width].to(torch.int32).reshape(self.batch, width)
            indices[: self.padded] = -1
            order = torch.randperm(self.batch, generator=generator, device=device)
            args["state_indices"] = indices[order].contiguous()
            if kernel.slots != "positions":
                args["state_indices"] = args["state_indices"].view(-1)
        if "records" in kernel.slots or (kernel.slots == "positions" and kernel.accepted):
            args["num_accepted_tokens"] = torch.randint(
                0, self.speculated + 1, (self.batch,), generator=generator, device=device
            ).to(torch.int32)
        if "records" in kernel.slots:
            of_records = (slots, self.speculated)
            k = normal(*of_records, heads, dim_k)
            if not kernel.l2norm:
                k = torch.nn.functional.normalize(k, dim=-1)
            args["record_k"] = k.to(kernel.dtype)
            record_g = self.gates(normal(*of_records, *self.gates_of_step))
            args["record_g"] = record_g.to(kernel.gate_dtype)
            args["record_u"] = normal(*of_records, heads_v, dim_v)
        of_drafts = (self.batch + 1, self.speculated)
        if kernel.slots == "drafts":
            shape = (*of_drafts, heads_v, *matrix)
            args["draft_states"] = torch.full(shape, torch.nan, device=device).to(
                kernel.state_dtype
            )
            rows = torch.randperm(self.batch + 1, generator=generator, device=device)
            args["draft_indices"] = rows[: self.batch].to(torch.int32)
        if kernel.conv_dtype is not None:
            channels = 2 * heads * dim_k + heads_v * dim_v
            drafted = kernel.slots == "positions" or "records" in kernel.slots
            length = TAPS - 1 + (self.speculated if drafted else 0)
            pool = normal(slots, length, channels).transpose(1, 2)  # as vLLM's
            if self.packing == "separate":  # as SGLang's
                pool = pool.contiguous()
            args["conv_state"] = pool = pool.to(kernel.dtype)
            if "records" in kernel.slots:  # the inputs of the recorded tokens
                of_k = slice(heads * dim_k, 2 * heads * dim_k)
                pool[:, of_k, TAPS - 1 :] = args["record_k"].flatten(2).transpose(1, 2)
            if kernel.slots == "drafts":
                shape = (*of_drafts, channels, TAPS - 1)
                args["draft_windows"] = torch.full(shape, torch.nan, device=device).to(kernel.dtype)
            args["conv_weight"] = (0.5 * normal(channels, TAPS)).to(kernel.conv_dtype)
            if kernel.conv_bias:
                args["conv_bias"] = normal(channels).to(kernel.conv_dtype)
        if self.give_out:
            args["out"] = torch.full((*step, heads_v, dim_v), torch.nan).to(device, kernel.dtype)
        return args

    @property
    def slots(self) -> int:
        """The number of the pool's slots."""
        if self.kernel.slots in ("batch", "own records"):
            return self.batch
        width = 1 + self.speculated if self.kernel.slots == "positions" else 1
        return self.batch * width + self.spare_slots

    @property
    def gates_of_step(self) -> tuple[int, ...]:
        """The dimensions of a token's gates."""
        if self.kernel.decays == "head":
            return (self.heads_v,)
        return (self.heads_v, self.kernel.head_dim_k)

    def gates(self, x: torch.Tensor) -> torch.Tensor:
        return -self.spread * x.abs() if self.kernel.gate == "none" else self.spread * x


def packed(args: dict[str, torch.Tensor], gap: int) -> dict[str, torch.Tensor]:
    """The arguments as views of one tensor for each dtype, in which they alternate with gaps."""
    views = dict(args)
    for dtype in {x.dtype for x in args.values()}:
        names = [name for name, x in args.items() if x.dtype == dtype]
        lead = 2 if args["beta"].dim() == 2 else 3
        rows = {name: args[name].flatten(lead - 1) for name in names}
        width = sum(x.shape[-1] + gap for x in rows.values())
        buffer = torch.zeros(*args["q"].shape[: lead - 1], width, dtype=dtype).to(args["q"].device)
        start = gap
        for name in names:
            part = buffer[..., start : start + rows[name].shape[-1]]
            part.copy_(rows[name])
            views[name] = part.unflatten(-1, args[name].shape[lead - 1 :])
            start += rows[name].shape[-1] + gap
    return {name: views[name] for name in args}


@st.composite
def cases(draw: st.DrawFn, device: str, kernels: list[Kernel] | None = None, **fixed: Any) -> Case:
    """Kernels are KDA's without a convolution by default. Fixed are fields of the kernel."""
    emulated = device == "cpu"
    if kernels is None and FULL:
        kernels = sample(200, seed=1, **KDA | fixed)
    else:
        kernels = [
            kernel
            for kernel in kernels or (EMULATED if emulated else SOME)
            if all(getattr(kernel, name) == value for name, value in fixed.items())
        ]
    kernel = draw(st.sampled_from(kernels))
    batch = draw(st.integers(1, 3 if emulated else 9))
    return Case(
        kernel,
        batch=batch,
        tokens=draw(st.integers(1, 4)) if kernel.multi_token else 1,
        heads=draw(st.integers(1, 2 if emulated else 4)),
        group=draw(st.integers(1, 2 if emulated else 3)),
        spare_slots=draw(st.integers(0, 3)),
        padded=draw(st.integers(0, batch)) if kernel.named_slots else 0,
        packing=draw(st.sampled_from(["separate", "packed", "misaligned"])),
        strided_state=draw(st.booleans()),
        neg_eigval=draw(st.booleans()),
        give_out=draw(st.booleans()),
        scale=draw(st.none() | st.floats(0.01, 2.0)),
        spread=draw(st.sampled_from([0.0, 0.1, 1.0, 10.0, 1000.0])),
        rate=draw(st.sampled_from([-4.0, 0.0, 2.5])),
        seed=draw(st.integers(0, 2**31)),
    )


def run(args: dict[str, Any]) -> Result:
    """One call, leaving the arguments as they are."""
    args = dict(args)
    for name in ("state", *POOLS):
        if name in args:
            args[name] = copied(args[name])
    if "out" in args:
        args["out"] = torch.full_like(args["out"], torch.nan)
    o = function_of(args)(**args)
    if "out" in args:
        assert o is args["out"]
    return Result(o, args["state"], *(args.get(name) for name in POOLS))


def function_of(args: dict[str, Any]) -> Any:
    """The public function that the arguments are for."""
    of_head = args["g"].dim() == args["beta"].dim()
    return cute_attn.gated_delta_rule_decode if of_head else cute_attn.kda_decode


def copied(x: torch.Tensor) -> torch.Tensor:
    """With the strides of x."""
    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return new.copy_(x)


def reference(args: dict[str, Any], dtype: torch.dtype) -> Result:
    args = {name: x for name, x in args.items() if name != "out"}
    given = [args.pop(name, None) for name in RECORDS]
    args["records"] = None if given[0] is None else KdaRecords(*given)
    of_head = args["g"].dim() == args["beta"].dim()
    run = gated_delta_rule_decode_reference if of_head else kda_decode_reference
    o, state, records, drafts, pool, windows = run(**args, dtype=dtype)
    o = o if dtype == torch.float64 else o.to(args["q"].dtype)
    return Result(o, state, *(records or (None,) * 3), pool, drafts, windows)


def assert_agrees(args: dict[str, Any], result: Result) -> None:
    exact, plain = reference(args, torch.float64), reference(args, torch.float32)
    assert result.o.dtype == args["q"].dtype
    assert result.o.shape == args["v"].shape
    assert_no_worse(result.o, plain.o, exact.o)
    assert_no_worse(result.state, plain.state, exact.state)
    if result.record_u is not None:
        assert_no_worse(result.record_u, plain.record_u, exact.record_u)
        assert torch.equal(result.record_k.double(), exact.record_k)
        assert torch.equal(result.record_g.double(), exact.record_g)
    if result.draft_states is not None:
        written = ~exact.draft_states.isnan()
        assert torch.equal(written, ~result.draft_states.isnan())
        found = (x.draft_states[written] for x in (result, plain, exact))
        assert_no_worse(*found)
    for name in ("conv_state", "draft_windows"):  # hold inputs as they are
        if getattr(result, name) is not None:
            assert same(getattr(result, name).double(), getattr(exact, name)), name


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether x and y are equal bitwise, NaN included."""
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


def assert_equal(one: Result, other: Result) -> None:
    """Bitwise."""
    for a, b in zip(one, other, strict=True):
        assert (a is None and b is None) or same(a, b)


def repeated_heads(case: Case, args: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments, with a query and key head for each value head."""
    changed = dict(args)
    for name in ("q", "k", "record_k"):
        if name in args:
            changed[name] = args[name].repeat_interleave(case.group, dim=-2)
    for name, dim in (
        ("conv_state", 1),
        ("conv_weight", 0),
        ("conv_bias", 0),
        ("draft_windows", 2),
    ):
        if name in args:
            changed[name] = repeated_channels(case, args[name], dim)
    return changed


def repeated_channels(case: Case, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The channels of a convolution, with those of q and k for each value head."""
    of_k = case.heads * case.kernel.head_dim_k
    *qk, v = x.split([of_k, of_k, x.shape[dim] - 2 * of_k], dim)
    heads = (y.unflatten(dim, (case.heads, -1)) for y in qk)
    repeated = (y.repeat_interleave(case.group, dim).flatten(dim, dim + 1) for y in heads)
    return torch.cat([*repeated, v], dim)
