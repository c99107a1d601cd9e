"""flash-linear-attention (FLA) with this package as a backend, on the cases of FLA's own tests.

On a GPU the sizes are FLA's, and FLA's Triton kernels run the same calls. Without a GPU the kernels
run in the emulator for an H100, on fewer tokens, sequences and heads. In both cases the results are
held to FLA's naive functions in PyTorch, by the bounds of FLA's tests.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cute_attn
from cute_attn.integrations import fla as integration
from cute_attn.ops import gated_delta_rule as gdn_operators
from cute_attn.ops import kda as kda_operators
from cute_attn.ops.kda.limits import HEAD_DIMS, STEP_HEAD_DIMS
from tests.integrations import test_fla_training as training
from tests.untuned import untuned

from .rows import shows

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

# FLA's bounds of relative errors, of a result and of gradients.
RESULTS = {"o": 0.005, "ht": 0.005}
GRADIENTS = {"dq": 0.008, "dk": 0.008, "dv": 0.008, "dg": 0.02, "dbeta": 0.02, "dh0": 0.008}
BOUNDS = RESULTS | GRADIENTS
LEAVES = ("q", "k", "v", "g", "beta", "initial_state")

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A case of FLA's tests.

    Attributes:
        heads: of q and k; heads_v: of v, the gate and beta.
        lengths: of packed sequences, in place of batch and tokens.
        normalizer: divides the log decays.
        masked: the share of tokens without decay.
        norm, gate, sigmoid: whether the kernel computes the norms of q and k, the decay from a
            gate's input, and the sigmoid of beta.
    """

    batch: int = 1
    tokens: int = 0
    heads: int = 4
    heads_v: int = 4
    dim: int = 64
    lengths: tuple[int, ...] = ()
    scale: float | None = None
    normalizer: float = 1.0
    masked: float = 0.0
    norm: bool = False
    gate: bool = False
    sigmoid: bool = False
    dtype: torch.dtype = torch.float16
    state_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        shape = self.lengths or (self.batch, self.tokens)
        flags = [name for name in ("norm", "gate", "sigmoid") if getattr(self, name)]
        parts = ["x".join(map(str, shape)), f"{self.heads}/{self.heads_v}", self.dim, *flags]
        return "-".join(map(str, parts))

    def sized(self) -> Case:
        """The case, smaller where kernels are emulated."""
        if GPU:
            return self
        group = self.heads_v // self.heads
        return replace(
            self,
            batch=1,
            tokens=min(self.tokens, 70),
            heads=1,
            heads_v=group,
            lengths=tuple(min(n, 40 + 30 * i) for i, n in enumerate(self.lengths[:2])),
        )


@dataclass(frozen=True)
class Kind:
    """A recurrence: FLA's functions and ours, and how many numbers a head's gate has."""

    name: str
    operators: ModuleType
    per_channel: bool

    @property
    def module(self) -> Any:
        return pytest.importorskip(f"fla.ops.{self.name}")

    def arguments(self, case: Case) -> dict[str, Any]:
        """Random arguments of FLA's functions, in the distributions of FLA's tests."""
        generator = torch.Generator().manual_seed(42)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        batch, tokens = (1, sum(case.lengths)) if case.lengths else (case.batch, case.tokens)
        sequences = len(case.lengths) or batch
        gates = (batch, tokens, case.heads_v, *([case.dim] if self.per_channel else []))
        q, k = (normal(batch, tokens, case.heads, case.dim) for _ in range(2))
        if not case.norm:
            q, k = (F.normalize(x, dim=-1) for x in (q, k))
        g, beta = normal(*gates), normal(batch, tokens, case.heads_v)
        if not case.gate:
            g = F.logsigmoid(g) / case.normalizer
            g = g * (torch.rand(gates, generator=generator) >= case.masked)
        found: dict[str, Any] = {
            "q": q.to(case.dtype),
            "k": k.to(case.dtype),
            "v": normal(batch, tokens, case.heads_v, case.dim).to(case.dtype),
            "g": g,
            "beta": beta if case.sigmoid else beta.sigmoid(),
            "initial_state": normal(sequences, case.heads_v, case.dim, case.dim),
        }
        found["initial_state"] = found["initial_state"].to(case.state_dtype)
        if case.gate:
            found["A_log"] = normal(case.heads_v)
            found["dt_bias"] = normal(case.heads_v * (case.dim if self.per_channel else 1))
        found = {name: x.to(DEVICE) for name, x in found.items()}
        if case.lengths:
            starts = [0, *itertools.accumulate(case.lengths)]
            found["cu_seqlens"] = torch.tensor(starts, device=DEVICE)
        return found | {
            "scale": case.scale,
            "use_qk_l2norm_in_kernel": case.norm,
            "use_gate_in_kernel": case.gate,
            "use_beta_sigmoid_in_kernel": case.sigmoid,
            "output_final_state": True,
        }

    def naive(self, **given: Any) -> tuple[Tensor, Tensor]:
        """FLA's naive function, with what it leaves to its caller."""
        q, k, v, g, beta = (given[name].float() for name in ("q", "k", "v", "g", "beta"))
        if given["use_qk_l2norm_in_kernel"]:
            q, k = (F.normalize(x, dim=-1) for x in (q, k))
        if given["use_gate_in_kernel"]:
            gate = pytest.importorskip(f"fla.ops.{self.name}.gate")
            g = getattr(gate, f"naive_{'kda' if self.per_channel else 'gdn'}_gate")(
                g, given["A_log"], given["dt_bias"]
            )
        if given["use_beta_sigmoid_in_kernel"]:
            beta = beta.sigmoid()
        group = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
        naive = pytest.importorskip(f"fla.ops.{self.name}.naive")
        function = getattr(naive, f"naive_recurrent_{self.name}")
        state = given["initial_state"].float()
        if "cu_seqlens" not in given:
            return function(
                q, k, v, g=g, beta=beta, scale=given["scale"], initial_state=state,
                output_final_state=True,
            )  # fmt: skip
        parts = [
            function(
                *(x[:, a:b] for x in (q, k, v)), g=g[:, a:b], beta=beta[:, a:b],
                scale=given["scale"], initial_state=state[i : i + 1], output_final_state=True,
            )
            for i, (a, b) in enumerate(itertools.pairwise(given["cu_seqlens"].tolist()))
        ]  # fmt: skip
        o, states = zip(*parts, strict=True)
        return torch.cat(o, dim=1), torch.cat(states)


KDA = Kind("kda", kda_operators, per_channel=True)
GDN = Kind("gated_delta_rule", gdn_operators, per_channel=False)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FLA with the backend registered, in the emulator where there is no GPU."""
    untuned(monkeypatch)
    integration.register()
    with contextlib.nullcontext() if GPU else cute_attn.emulated("sm_90a"):
        yield


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often FLA called each of our operators."""
    calls: Counter[str] = Counter()

    def counted(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return operator(*args, **kwargs)

        return call

    for module, names in (
        (kda_operators, ("chunk_kda", "fused_recurrent_kda", "kda_decode")),
        (gdn_operators, ("chunk_gated_delta_rule",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return calls


def results(function: Callable[..., Any], given: dict[str, Any], *, gradients: bool) -> Results:
    """o, the final state, and on request gradients through both."""
    if not gradients:
        with torch.no_grad():
            o, state = function(**given)
        return {"o": o, "ht": state}
    leaves = {name: given[name].detach().clone().requires_grad_() for name in LEAVES}
    o, state = function(**given | leaves)
    generator = torch.Generator().manual_seed(7)
    do, dht = (torch.randn(x.shape, generator=generator).to(DEVICE) for x in (o, state))
    found = torch.autograd.grad((o * do).sum() + (state * dht).sum(), list(leaves.values()))
    names = [{"initial_state": "dh0"}.get(name, f"d{name}") for name in LEAVES]
    return {"o": o.detach(), "ht": state.detach(), **dict(zip(names, found, strict=True))}


def assert_agrees(found: Results, exact: Results) -> None:
    """By FLA's measure: the error's root mean square over the result's, unless no number is off by
    more than 1e-6."""
    for name, y in found.items():
        x, y = exact[name], y.float()
        assert y.shape == x.shape and y.isfinite().all(), name
        x = x.float()
        if float((y - x).abs().max()) <= 1e-6:
            continue
        error = float((y - x).square().mean().sqrt() / x.square().mean().sqrt())
        assert error < BOUNDS[name], f"{name}: relative error {error:.5f}, bound {BOUNDS[name]}"


def check(
    kind: Kind,
    name: str,
    case: Case,
    reached: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    gradients: bool,
    taken: bool = True,
) -> None:
    """Call FLA's function: our kernels take the call, or FLA's. Then FLA's take it in any case."""
    given = kind.arguments(case.sized())
    function = getattr(kind.module, name)
    exact = results(kind.naive, given, gradients=gradients)
    if taken:
        ours = results(function, given, gradients=gradients)
        assert reached == {name: 1} and set(ours) == set(exact)
        assert_agrees(ours, exact)
        monkeypatch.setenv(integration.ENVIRONMENT_VARIABLE, "0")
    if GPU:
        assert_agrees(theirs(function, given, gradients=gradients), exact)
        assert reached == ({name: 1} if taken else {})


def theirs(function: Callable[..., Any], given: dict[str, Any], *, gradients: bool) -> Results:
    """What FLA's Triton kernels compute. With some releases of Triton, FLA refuses the gradients of
    the Gated Delta Net on Hopper, because they would be wrong."""
    try:
        return results(function, given, gradients=gradients)
    except RuntimeError as error:
        if "produces incorrect results" not in str(error):
            raise
        return results(function, given, gradients=False)


def cases(feature: str, *found: Case) -> Any:
    return lambda test: pytest.mark.clients(feature)(
        pytest.mark.parametrize("case", found, ids=str)(test)
    )


# -- KDA: the cases of FLA's tests/ops/test_kda.py


@cases(
    "`chunk_kda` with gradients, in FLA's cases",
    Case(1, 63, 1, 1, 64, scale=1.0),
    Case(2, 1000, 3, 3, 64, scale=0.1, masked=0.5),
    Case(4, 1024, 4, 4, 128, scale=0.1),
    Case(4, 1024, 4, 4, 128, scale=0.1, norm=True),
    Case(2, 1500, 4, 4, 128, scale=0.1, gate=True),
    Case(4, 2048, 8, 8, 64, scale=0.1, gate=True),
)
def test_chunk_kda(case: Case, reached: Counter[str], monkeypatch: pytest.MonkeyPatch):
    check(KDA, "chunk_kda", case, reached, monkeypatch, gradients=True)


PACKED = (256, 244, 500)


@cases(
    "`chunk_kda` with gradients, packed sequences",
    Case(lengths=PACKED),
    Case(lengths=PACKED, dim=128, masked=0.5),
)
def test_packed_chunk_kda(case: Case, reached: Counter[str], monkeypatch: pytest.MonkeyPatch):
    check(KDA, "chunk_kda", case, reached, monkeypatch, gradients=True)


@cases(
    "`fused_recurrent_kda`, in FLA's cases",
    Case(1, 64, 1, 1, 64, scale=1.0, dtype=torch.float32),
    Case(4, 1024, 4, 4, 128, scale=0.1, dtype=torch.float32),
    Case(3, 1000, 4, 4, 128, scale=0.1, norm=True, dtype=torch.float16),
)
def test_fused_recurrent_kda(case: Case, reached: Counter[str], monkeypatch: pytest.MonkeyPatch):
    check(KDA, "fused_recurrent_kda", case, reached, monkeypatch, gradients=False)


# -- the Gated Delta Net: the cases of FLA's tests/ops/test_gdn.py


@cases(
    "`chunk_gated_delta_rule` with gradients, in FLA's cases",
    Case(4, 1024, 4, 4, 128, scale=0.1, masked=1.0),
    Case(2, 75, 4, 4, 64, scale=1.0, normalizer=0.01),
    Case(2, 1000, 3, 3, 64, scale=0.1, masked=0.5),
    Case(4, 1024, 4, 4, 128, scale=0.1, norm=True),
    Case(2, 1500, 4, 4, 128, scale=0.1, normalizer=10),
    Case(2, 512, 2, 8, 64, scale=1.0, normalizer=0.1, norm=True),
    Case(2, 1024, 4, 8, 128, scale=0.1, sigmoid=True),
    Case(4, 1024, 4, 4, 128, scale=0.1, norm=True, gate=True),
)
def test_chunk_gated_delta_rule(case: Case, reached: Counter[str], monkeypatch: pytest.MonkeyPatch):
    check(GDN, "chunk_gated_delta_rule", case, reached, monkeypatch, gradients=True)


@cases(
    "`chunk_gated_delta_rule` with gradients, packed sequences",
    Case(lengths=PACKED),
    Case(lengths=PACKED, heads=2, masked=0.5),
    Case(lengths=PACKED, heads=2, heads_v=8, state_dtype=torch.bfloat16),
)
def test_packed_chunk_gated_delta_rule(
    case: Case, reached: Counter[str], monkeypatch: pytest.MonkeyPatch
):
    check(GDN, "chunk_gated_delta_rule", case, reached, monkeypatch, gradients=True)


@cases(
    "`fused_recurrent_gated_delta_rule`, which has no backends: with our import, in FLA's cases",
    Case(1, 63, 1, 1, 64, scale=1.0, norm=True, dtype=torch.float32),
    Case(2, 1000, 2, 8, 128, scale=1.0, normalizer=0.1, norm=True, dtype=torch.float32),
    Case(2, 1024, 4, 8, 128, scale=1.0, normalizer=10, norm=True),
    Case(2, 512, 2, 4, 64, scale=0.1, norm=True, gate=True),
    Case(lengths=PACKED, heads=2, norm=True, gate=True),
)
def test_fused_recurrent_gated_delta_rule(case: Case):
    given = GDN.arguments(case.sized())
    exact = results(GDN.naive, given, gradients=False)
    name = "fused_recurrent_gated_delta_rule"
    assert_agrees(results(getattr(cute_attn, name), given, gradients=False), exact)
    if GPU:
        assert_agrees(results(getattr(GDN.module, name), given, gradients=False), exact)


# -- layers


@pytest.fixture
def fla() -> Any:
    return KDA.module


test_a_layer = pytest.mark.gpu(
    shows(
        "FLA's layers `KimiDeltaAttention` and `GatedDeltaNet`: output and gradients",
        training.test_a_layer,
    )
)


# -- what stays with FLA


@pytest.mark.clients("Other head dimensions stay on FLA's kernels")
@pytest.mark.parametrize("kind", [KDA, GDN], ids=lambda kind: kind.name)
def test_other_sizes(kind: Kind, reached: Counter[str], monkeypatch: pytest.MonkeyPatch):
    """Of FLA's cases, those with 60 and 100 channels are FLA's own; the backend says why."""
    case = Case(2, 100, 3, 3, 60, scale=1.0)
    check(kind, f"chunk_{kind.name}", case, reached, monkeypatch, gradients=True, taken=False)
    dims = {"chunk": HEAD_DIMS["K"], "recurrent": STEP_HEAD_DIMS["K"]}
    assert all(60 not in known and 100 not in known for known in dims.values())
    declines = getattr(integration, f"_declines_chunk_{kind.name}")
    assert "K is 60" in declines(kind.arguments(case))
