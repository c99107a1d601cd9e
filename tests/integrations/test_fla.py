"""flash-linear-attention with this package as a backend: what reaches our kernels and what not.

Calls go through flash-linear-attention's own functions. Without a GPU they end in the emulator, and
are held to the float64 reference; on one they are held to its Triton kernels as well.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cute_attn.ops.kda as operators
from cute_attn.integrations import fla as integration
from cute_attn.reference import kda as reference
from tests.naive import naive_inputs
from tests.ops.lightning_cases import assert_no_worse

DTYPE = torch.bfloat16
PLAIN = {"dtype": torch.float32, "stage_dtype": DTYPE}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The warnings of flash-linear-attention, which gives each only once in a process."""
    backends = pytest.importorskip("fla.backends", exc_type=ImportError)
    for registry in itertools.chain(
        backends._function_registries.values(), backends._operation_registries.values()
    ):
        registry._logged.clear()
    with caplog.at_level(logging.INFO, logger="fla.backends"):
        yield caplog


class Case:
    """Random arguments of `chunk_kda`, with gate, norms and sigmoid in the kernel."""

    def __init__(self, device: str, *, packed: bool = False, heads: int = 1, **changes: Any):
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        batch, tokens, heads_v, dim = (1, 100, 2, 64) if packed else (2, 70, 2, 64)
        sequences = 3 if packed else batch
        self.arguments: dict[str, Any] = {
            "q": normal(batch, tokens, heads, dim),
            "k": normal(batch, tokens, heads, dim),
            "v": normal(batch, tokens, heads_v, dim),
            "g": normal(batch, tokens, heads_v, dim),
            "beta": normal(batch, tokens, heads_v),
            "initial_state": normal(sequences, heads_v, dim, dim, dtype=torch.float32),
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "A_log": normal(heads_v, dtype=torch.float32) * 0.3,
            "dt_bias": normal(heads_v * dim, dtype=torch.float32) - 2.0,
        }
        if packed:
            self.arguments["cu_seqlens"] = torch.tensor([0, 30, 30, tokens], device=device)
        self.arguments |= changes

    @property
    def of_definition(self) -> dict[str, Any]:
        """The arguments that decide the results."""
        others = ("chunk_size", "disable_recompute")
        return {name: x for name, x in self.arguments.items() if name not in others}

    def weights(self, results: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Random gradients of o and of the final state, in the dtypes of these results."""
        generator = torch.Generator().manual_seed(8)
        v, state = self.arguments["v"], self.arguments["initial_state"]
        do, dfinal_state = (
            torch.randn(x.shape, generator=generator).to(DTYPE).to(x.device, y.dtype)
            for x, y in zip((v, state), results or (v, state), strict=True)
        )
        return do, dfinal_state

    def assert_agrees(self, o: torch.Tensor, final_state: torch.Tensor) -> None:
        exact = reference.kda_chunk_reference(**self.of_definition)
        plain = reference.kda_chunk_reference(**self.of_definition, **PLAIN)
        assert o.dtype == DTYPE
        assert_no_worse(o, plain.o.to(DTYPE), exact.o)
        assert_no_worse(final_state, plain.states.final_state, exact.states.final_state)


CASES: dict[str, dict[str, Any]] = {
    "grouped value heads": {"safe_gate": True, "lower_bound": -5.0},
    "one head each, softplus": {"heads": 2},
    "packed, states of V by K": {
        "packed": True,
        "state_v_first": True,
        "lower_bound": -5.0,
        "chunk_size": 32,
    },
}


# -- what reaches us


@pytest.mark.everywhere
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_chunk_kda_is_ours(
    fla: Any, reached: Counter[str], monkeypatch: pytest.MonkeyPatch, device: str, name: str
) -> None:
    case = Case(device, **CASES[name])
    o, final_state = fla.chunk_kda(**case.arguments, output_final_state=True)
    assert reached == {"chunk_kda": 1}
    case.assert_agrees(o, final_state)
    if device == "cuda":
        monkeypatch.setenv("FLA_CUTE_ATTN", "0")
        theirs = fla.chunk_kda(**case.arguments, output_final_state=True)
        assert reached == {"chunk_kda": 1}
        case.assert_agrees(*theirs)


@pytest.mark.everywhere
@torch.inference_mode()
def test_intermediate_states(fla: Any, reached: Counter[str], device: str) -> None:
    case = Case(device, packed=True)
    offsets = case.arguments["cu_seqlens"].cpu()
    o, final_state, h = fla.chunk_kda(
        **case.arguments,
        output_final_state=True,
        return_intermediate_states=True,
        cu_seqlens_cpu=offsets,
    )
    assert reached["chunk_kda"] == 1
    case.assert_agrees(o, final_state)
    exact = reference.kda_chunk_reference(**case.arguments).states.h
    plain = reference.kda_chunk_reference(**case.arguments, **PLAIN).states.h
    assert h.shape == exact.shape
    assert_no_worse(h, plain.to(h.dtype), exact)


@pytest.mark.everywhere
@torch.no_grad()
def test_the_recurrent_form_is_ours(fla: Any, reached: Counter[str], device: str) -> None:
    case = Case(device)
    o, final_state = fla.fused_recurrent_kda(**case.arguments, output_final_state=True)
    assert reached == {"fused_recurrent_kda": 1}
    exact = reference.kda_reference(**case.arguments)
    plain = reference.kda_reference(**case.arguments, dtype=torch.float32)
    assert_no_worse(o, plain.o.to(DTYPE), exact.o)
    assert_no_worse(final_state, plain.final_state, exact.final_state)


@pytest.mark.everywhere
@pytest.mark.parametrize("how", ["in place", "slots", "speculative"])
@torch.no_grad()
def test_states_in_place_are_ours(
    fla: Any, reached: Counter[str], monkeypatch: pytest.MonkeyPatch, device: str, how: str
) -> None:
    """As servers call it: a pool of states, written where it was read."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    tokens = 3 if how == "speculative" else 1
    arguments = Case(device).arguments
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name] = arguments[name][:, :tokens].contiguous()
    pool = torch.randn(9, *arguments.pop("initial_state").shape[1:], device=device)
    arguments |= {"state_v_first": True, "lower_bound": -5.0}
    indices: dict[str, torch.Tensor] = {}
    if how == "in place":
        pool = pool[:2].contiguous()
    elif how == "slots":
        indices["state_indices"] = torch.tensor([7, 2], dtype=torch.int32, device=device)
    else:
        slots = torch.tensor([[4, 1, 2], [7, 0, 3]], dtype=torch.int32, device=device)
        accepted = torch.tensor([2, 3], dtype=torch.int32, device=device)
        indices = {"state_indices": slots, "num_accepted_tokens": accepted}
    theirs = {
        {"state_indices": "ssm_state_indices"}.get(name, name): x for name, x in indices.items()
    }

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        state = pool.clone()
        o, final_state = fused_recurrent_kda_fwd(**arguments, initial_state=state, **theirs)
        assert final_state is state
        return o, state

    exact = reference.kda_decode_reference(**arguments, state=pool, **indices)
    plain = reference.kda_decode_reference(**arguments, state=pool, **indices, dtype=torch.float32)
    results = [step()]
    assert reached == {"kda_decode": 1}
    if device == "cuda":
        monkeypatch.setenv("FLA_CUTE_ATTN", "0")
        results.append(step())
        assert reached == {"kda_decode": 1}
    for o, state in results:
        assert_no_worse(o, plain.o.to(DTYPE), exact.o)
        assert_no_worse(state, plain.state, exact.state)


@pytest.mark.everywhere
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@torch.no_grad()
def test_the_stages_are_ours(fla: Any, reached: Counter[str], device: str, packed: bool) -> None:
    """As flash-linear-attention's chunked forward calls them, whatever it is called for."""
    from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
    from fla.ops.kda.gate import kda_gate_chunk_cumsum
    from fla.ops.kda.wy_fast import recompute_w_u_fwd

    given = Case(device, packed=packed).arguments
    cu_seqlens = given.get("cu_seqlens")
    gate = {name: given[name] for name in ("A_log", "dt_bias")}
    G = kda_gate_chunk_cumsum(
        given["g"], chunk_size=64, scale=integration.LN2_RECIPROCAL, cu_seqlens=cu_seqlens, **gate
    )
    logarithms = reference.log_decay(given["g"], **gate)
    exact_G = reference.kda_gate_cumsum_reference(logarithms, cu_seqlens=cu_seqlens)
    plain_G = reference.kda_gate_cumsum_reference(
        reference.log_decay(given["g"], **gate, dtype=torch.float32),
        cu_seqlens=cu_seqlens,
        dtype=torch.float32,
    )
    assert_no_worse(G, plain_G, exact_G)

    q, k = (reference.l2norm(given[name]).to(DTYPE) for name in ("q", "k"))
    v, beta = given["v"], torch.sigmoid(given["beta"].float())
    tensors = (q, k, v, G, beta)
    results = chunk_kda_fwd_intra(
        q=q, k=k, v=v, gk=G, beta=beta, scale=0.125, cu_seqlens=cu_seqlens, safe_gate=True
    )
    found = dict(zip(("w", "u", "qg", "kg", "Aqk", "Akk"), results, strict=True))
    assert found.pop("qg") is None
    exact = reference.kda_chunk_intra_reference(*tensors, 0.125, cu_seqlens=cu_seqlens)
    plain = reference.kda_chunk_intra_reference(*tensors, 0.125, cu_seqlens=cu_seqlens, **PLAIN)
    for name, x in found.items():
        assert_no_worse(x, getattr(plain, name), getattr(exact, name))

    Akk = found["Akk"]
    again = recompute_w_u_fwd(k=k, v=v, beta=beta, A=Akk, gk=G, q=q, cu_seqlens=cu_seqlens)
    exact_again = reference.kda_recompute_w_u_reference(*tensors, Akk, cu_seqlens=cu_seqlens)
    plain_again = reference.kda_recompute_w_u_reference(
        *tensors, Akk, cu_seqlens=cu_seqlens, **PLAIN
    )
    for x, p, e in zip(again, plain_again, exact_again, strict=True):
        assert_no_worse(x, p, e)
    assert reached == {"kda_gate_cumsum": 1, "kda_chunk_intra": 1, "kda_recompute_w_u": 1}


LEAVES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")

Call = Callable[[dict[str, Any]], tuple[torch.Tensor, torch.Tensor]]


def gradients(case: Case, call: Call) -> list[torch.Tensor]:
    """The gradients of `LEAVES`, through o and the final state."""
    leaves = {name: case.arguments[name].detach().clone().requires_grad_() for name in LEAVES}
    results = call(case.arguments | leaves)
    return list(torch.autograd.grad(results, list(leaves.values()), case.weights(results)))


def assert_gradients_no_worse(ours: Any, theirs: Any, exact: Any) -> None:
    """By the error rule, each but that of A_log: of its few elements an error says little. All
    together, relative to their norms, too."""
    for name, *found in zip(LEAVES, ours, theirs, exact, strict=True):
        if name != "A_log":
            assert_no_worse(*(x.double().view(found[0].shape) for x in found))
    norms = [x.double().norm() for x in exact]
    together = (
        torch.cat([(x.double() / n).flatten() for x, n in zip(gradient, norms, strict=True)])
        for gradient in (ours, theirs, exact)
    )
    assert_no_worse(*together)


@pytest.mark.everywhere
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_ours(
    fla: Any, reached: Counter[str], monkeypatch: pytest.MonkeyPatch, device: str, name: str
) -> None:
    """Also where the backend is off by the time of the backward."""
    case = Case(device, **CASES[name])

    def call(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        results: tuple[torch.Tensor, torch.Tensor] = fla.chunk_kda(**given, output_final_state=True)
        monkeypatch.setenv("FLA_CUTE_ATTN", "0")
        return results

    ours = gradients(case, call)
    assert reached == {"chunk_kda": 1}
    do, dfinal_state = case.weights()
    of = case.of_definition | {"do": do, "dfinal_state": dfinal_state}
    found = (
        reference.kda_gradients(**of),
        reference.kda_chunk_gradients(**of, **PLAIN),
    )
    exact, plain = ([getattr(x, f"d{leaf}") for leaf in LEAVES] for x in found)
    plain = [x.to(y.dtype) for x, y in zip(plain, ours, strict=True)]
    assert_gradients_no_worse(ours, plain, exact)


BOUNDED = {"lower_bound": -5.0, "safe_gate": True, "allow_neg_eigval": True}
STEPS: dict[str, tuple[bool, dict[str, Any]]] = {  # whether the whole call is ours
    "dense": (True, {"heads": 2}),
    "packed": (True, {"packed": True, "heads": 2}),
    "grouped value heads": (True, {"packed": True, "disable_recompute": True, **BOUNDED}),
    "stages, dense": (False, {"heads": 2}),
    "stages, packed": (False, {"packed": True, "heads": 2}),
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`transpose_state_layout`")
@pytest.mark.parametrize("name", STEPS)
def test_a_training_step(
    fla: Any, reached: Counter[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Gradients with our chunk_kda, and with our stages where it is declined, are as near to those
    of its naive function as with its own, or as plain PyTorch's where these are farther: of beta
    they are, because we round r and v', whose product it is, where it rounds neither v nor k."""
    from fla.ops.kda.naive import naive_recurrent_kda

    whole, changes = STEPS[name]
    case = Case("cuda", **changes)

    def naive(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        tensors, states = naive_inputs(given), given["initial_state"]
        rows = [slice(None)]
        if "cu_seqlens" in given:
            rows = [slice(a, b) for a, b in itertools.pairwise(given["cu_seqlens"].tolist())]
        results = [
            naive_recurrent_kda(
                *(x[:, at] for x in tensors),
                initial_state=states if len(rows) == 1 else states[n : n + 1],
                output_final_state=True,
            )
            for n, at in enumerate(rows)
        ]
        o, final_states = zip(*results, strict=True)
        return torch.cat(o, dim=1), torch.cat(final_states)

    def step(**more: Any) -> list[torch.Tensor]:
        return gradients(
            case, lambda given: fla.chunk_kda(**given, **more, output_final_state=True)
        )

    exact = gradients(case, naive)
    # Its former name of an argument is declined.
    ours = step(**({} if whole else {"transpose_state_layout": False}))
    assert reached["chunk_kda"] == whole
    for stage in ("kda_gate_cumsum", "kda_chunk_intra", "kda_recompute_w_u"):
        assert (reached[stage] == 0) == whole
    monkeypatch.setenv("FLA_CUTE_ATTN", "0")
    before = reached.total()
    theirs = step()
    assert reached.total() == before
    do, dfinal_state = case.weights()
    of = reference.kda_chunk_gradients(
        **case.of_definition, do=do, dfinal_state=dfinal_state, **PLAIN
    )
    plain = [getattr(of, f"d{leaf}").to(x.dtype) for leaf, x in zip(LEAVES, ours, strict=True)]
    exact = [x.double() for x in exact]
    farther = [
        max(pair, key=lambda x, true=true: (x.double().view(true.shape) - true).norm().item())
        for *pair, true in zip(theirs, plain, exact, strict=True)
    ]
    assert_gradients_no_worse(ours, farther, exact)


# -- what does not


def test_off_by_the_environment(
    fla: Any, reached: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = Case(device)
    monkeypatch.setenv("FLA_CUTE_ATTN", "0")
    with contextlib.suppress(Exception), torch.no_grad():  # its Triton kernels want a GPU
        fla.chunk_kda(**case.arguments)
    assert not reached


def test_gradients_of_the_recurrent_form_are_declined_with_a_reason(
    fla: Any, reached: Counter[str], log: pytest.LogCaptureFixture
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = Case(device)
    case.arguments["q"].requires_grad_()
    with contextlib.suppress(Exception):
        fla.fused_recurrent_kda(**case.arguments)
    assert reached["fused_recurrent_kda"] == 0
    assert "cute_attn rejected: cute_attn has no backward for it" in log.text


def test_registering_again_changes_nothing(fla: Any) -> None:
    import fla.backends as backends

    integration.register()
    registry = backends._operation_registries["kda"]
    assert [type(b).__name__ for b in registry._backends.values()].count("CuteAttnBackend") == 1


@pytest.fixture
def emulated() -> Iterator[None]:
    """Run in the emulator, so that the backend's verifier accepts CPU tensors."""
    import cute_attn

    with cute_attn.emulated("sm_90a"):
        yield


CHUNK_KDA_DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "context parallel": ({"cp_context": object()}, "context parallelism"),
    "chunks of 16": ({"chunk_size": 16}, "chunk_size is 16"),
    "states of chunks of 32": (
        {"chunk_size": 32, "return_intermediate_states": True},
        "states of chunks of 64",
    ),
    "old name": ({"transpose_state_layout": True}, "state_v_first"),
    "float32": ({"k": torch.randn(2, 70, 1, 64)}, "k has dtype torch.float32"),
    "two dtypes": ({"v": torch.randn(2, 70, 2, 64).half()}, "v has dtype torch.float16 and k"),
    "K": ({"k": torch.randn(2, 70, 1, 32).bfloat16()}, "K is 32"),
    "V": ({"v": torch.randn(2, 70, 2, 512).bfloat16()}, "V is 512"),
    "beta of V": ({"beta": torch.randn(2, 70, 2, 64)}, "one beta a head"),
    "double gates": ({"g": torch.randn(2, 70, 2, 64).double()}, "gates of torch.float64"),
    "double states": (
        {"initial_state": torch.zeros(2, 2, 64, 64).double()},
        "initial_state has dtype",
    ),
    "more states": ({"initial_state": torch.zeros(3, 2, 64, 64)}, "3 states for 2 sequences"),
    "a bound of 0": ({"lower_bound": 0.0}, "lower_bound is 0.0"),
    "a tensor": ({"scale": torch.tensor(0.5)}, "scale is a tensor"),
    "chunks unknown": (
        {"cu_seqlens": torch.tensor([0, 70]), "return_intermediate_states": True},
        "without cu_seqlens_cpu",
    ),
    "chunks that change": (
        {
            "cu_seqlens": torch.tensor([0, 70]),
            "cu_seqlens_cpu": torch.tensor([0, 70]),
            "return_intermediate_states": True,
            "use_graph": True,
        },
        "from replay to replay",
    ),
}


def test_gradients_are_declined_where_they_do_not_fit() -> None:
    """At K = 128 with 99 KiB of shared memory."""
    import cute_attn

    small, large = Case("cpu").arguments, Case("cpu").arguments
    for name in ("q", "k", "g"):
        large[name] = torch.cat([large[name], large[name]], dim=-1)
    with cute_attn.emulated("sm_89"):
        assert integration._declines_chunk_kda(large) is None
        for arguments in (small, large):
            arguments["q"].requires_grad_()
        assert integration._declines_chunk_kda(small) is None
        assert "no gradients here" in str(integration._declines_chunk_kda(large))
        with torch.no_grad():
            assert integration._declines_chunk_kda(large) is None
    with cute_attn.emulated("sm_90a"):
        assert integration._declines_chunk_kda(large) is None


@pytest.mark.parametrize("what", CHUNK_KDA_DECLINED)
@torch.no_grad()
def test_chunk_kda_declined(emulated: None, what: str) -> None:
    change, reason = CHUNK_KDA_DECLINED[what]
    arguments = Case("cpu").arguments
    assert integration._declines_chunk_kda(arguments) is None
    assert reason in str(integration._declines_chunk_kda(arguments | change))


@torch.no_grad()
def test_tensors_without_a_gpu_are_declined() -> None:
    assert "are on cpu" in str(integration._declines_chunk_kda(Case("cpu").arguments))


INT32 = {"dtype": torch.int32}
RECURRENT_DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "slots elsewhere": ({"ssm_state_indices": torch.zeros(2, **INT32)}, "in place only"),
    "out": ({"out": torch.zeros(1)}, "in place only"),
    "K": ({"k": torch.randn(2, 70, 1, 32).bfloat16()}, "K is 32"),
    "double": ({"k": torch.randn(2, 70, 1, 64).double()}, "k has dtype torch.float64"),
    "double states": (
        {"initial_state": torch.zeros(2, 2, 64, 64).double()}, "initial_state has dtype",
    ),
    "packed states": (
        {"cu_seqlens": torch.tensor([0, 30, 70, 70])}, "2 states for 3 sequences",
    ),
}  # fmt: skip
IN_PLACE_DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "packed": ({"cu_seqlens": torch.tensor([0, 2])}, "no packed sequences"),
    "state": ({"initial_state": torch.zeros(2, 2, 64, 64).half()}, "initial_state has dtype"),
    "no state": ({"initial_state": None}, "initial_state is None"),
    "more states": ({"initial_state": torch.zeros(3, 2, 64, 64)}, "3 states for 2 sequences"),
    "strided": ({"initial_state": torch.zeros(2, 2, 64, 64).mT}, "initial_state has strides"),
    "misaligned": (
        {"initial_state": torch.zeros(2 * 2 * 64 * 64 + 1)[1:].view(2, 2, 64, 64)},
        "initial_state starts at address",
    ),
    "strided A_log": ({"A_log": torch.zeros(2, 2)[:, 0]}, "A_log has strides"),
    "half A_log": ({"A_log": torch.zeros(2).half()}, "A_log has dtype torch.float16"),
    "half dt_bias": ({"dt_bias": torch.zeros(128).half()}, "dt_bias has dtype torch.float16"),
    "int64": ({"ssm_state_indices": torch.zeros(2, 70).long()}, "contiguous int32"),
    "one slot": ({"ssm_state_indices": torch.zeros(2, **INT32)}, "70 tokens for each sequence"),
    "few slots": ({"ssm_state_indices": torch.zeros(2, 3, **INT32)}, "a slot for 3"),
    "accepted": (
        {
            "ssm_state_indices": torch.zeros(2, 70, **INT32),
            "num_accepted_tokens": torch.ones(2).long(),
        },
        "num_accepted_tokens as int32",
    ),
    "beta of V": ({"beta": torch.randn(2, 70, 2, 64)}, "one beta a head"),
}


@pytest.mark.parametrize("what", [*RECURRENT_DECLINED, *IN_PLACE_DECLINED])
@torch.no_grad()
def test_the_recurrent_form_declined(emulated: None, what: str) -> None:
    arguments = Case("cpu").arguments
    assert integration._declines_recurrent(arguments) is None  # in place, by default
    if what in RECURRENT_DECLINED:
        change, reason = RECURRENT_DECLINED[what]
        arguments["inplace_final_state"] = False
        assert integration._declines_recurrent(arguments) is None
    else:
        change, reason = IN_PLACE_DECLINED[what]
    assert reason in str(integration._declines_recurrent(arguments | change))


@torch.no_grad()
def test_the_recurrent_form_takes_a_beta_for_each_column(emulated: None) -> None:
    beta = torch.randn(2, 70, 2, 64)
    given = Case("cpu").arguments | {"beta": beta, "inplace_final_state": False}
    assert integration._declines_recurrent(given) is None


class Recorded(Exception):
    """Our operator was called, with these arguments."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Calls a function of the backend's, and returns what it hands to our operator."""
    for name in ("chunk_kda", "fused_recurrent_kda", "kda_decode", "kda_gate_cumsum"):

        def record(*args: Any, name: str = name, **kwargs: Any) -> Any:
            raise Recorded(name, kwargs)

        monkeypatch.setattr(operators, name, record)

    def call(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
        with pytest.raises(Recorded) as caught:
            function(**arguments)
        name, kwargs = caught.value.args
        return {"operator": name, **kwargs}

    return call


FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")


@pytest.mark.parametrize("in_place", [False, True])
@torch.no_grad()
def test_what_the_library_takes_for_flags_and_numbers(
    emulated: None, called: Callable[..., dict[str, Any]], in_place: bool
) -> None:
    arguments = Case("cpu").arguments
    odd: dict[str, Any] = dict.fromkeys((*FLAGS, "allow_neg_eigval", "state_v_first"))
    odd |= {"scale": np.float32(0.5), "lower_bound": np.float64(-5.0), "anything": object()}
    steps = arguments | odd | {"inplace_final_state": in_place or None}
    whole = arguments | odd | {"output_final_state": None, "safe_gate": np.bool_(False)}
    assert integration._declines_recurrent(steps) is None
    assert integration._declines_chunk_kda(whole) is None
    for found in (
        called(integration._fused_recurrent_kda, **steps),
        called(integration._chunk_kda, **whole),
    ):
        for name, x in found.items():
            if name in integration._FLAGS:
                assert x is False, name
        assert type(found["scale"]) is type(found["lower_bound"]) is float
        assert (found["scale"], found["lower_bound"]) == (0.5, -5.0)
        assert "anything" not in found
    gate = {"g": arguments["g"], "chunk_size": 64, "scale": np.float32(integration.LN2_RECIPROCAL)}
    assert integration._declines_gate(gate | {"lower_bound": np.float32(-5.0)}) is None
    found = called(integration._gate_cumsum, **gate, lower_bound=np.float32(-5.0))
    assert type(found["lower_bound"]) is float


@pytest.mark.parametrize("in_place", [False, True])
@torch.no_grad()
def test_what_the_library_ignores(
    emulated: None, called: Callable[..., dict[str, Any]], in_place: bool
) -> None:
    arguments = Case("cpu").arguments | {
        "use_beta_sigmoid_in_kernel": False,
        "allow_neg_eigval": True,
        "use_gate_in_kernel": False,
        "lower_bound": 0.0,
        "A_log": torch.zeros(2, 2).double()[:, 0],
        "num_accepted_tokens": torch.ones(2, **INT32),
        "inplace_final_state": in_place,
    }
    assert integration._declines_recurrent(arguments) is None
    found = called(integration._fused_recurrent_kda, **arguments)
    assert found["allow_neg_eigval"] is False and found["A_log"] is found["dt_bias"] is None
    assert found.get("num_accepted_tokens") is None


@torch.no_grad()
def test_it_runs_without_them(emulated: None) -> None:
    """What the backend hands on, our operators take."""
    arguments = Case("cpu").arguments
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name] = arguments[name][:, :1].contiguous()
    results = []
    for change in ({}, {"allow_neg_eigval": True, "scale": np.float32(0.125), "anything": 1}):
        options = dict.fromkeys(FLAGS, None if change else False) | change
        state = arguments["initial_state"].clone()
        taken = arguments | options | {"initial_state": state, "inplace_final_state": True}
        results.append(integration._fused_recurrent_kda(**taken))
    assert all(map(torch.equal, *results))


GATE_DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "chunks of 32": ({"chunk_size": 32}, "chunk_size is 32"),
    "base e": ({"scale": None}, "sums in base 2"),
    "dtype": ({"output_dtype": torch.bfloat16}, "sums in float32"),
    "K": ({"g": torch.randn(2, 70, 2, 32)}, "no kernel for a g of shape"),
}


@pytest.mark.parametrize("what", GATE_DECLINED)
def test_the_gate_declined(emulated: None, what: str) -> None:
    change, reason = GATE_DECLINED[what]
    arguments = {"g": torch.randn(2, 70, 2, 64), "chunk_size": 64, "scale": 1 / 0.6931471805599453}
    assert integration._declines_gate(arguments) is None
    assert reason in str(integration._declines_gate(arguments | change))


@torch.no_grad()
def test_the_stages_declined(emulated: None) -> None:
    given = Case("cpu").arguments
    arguments = {name: given[name] for name in ("q", "k", "v", "beta")}
    arguments |= {"gk": given["g"].float(), "A": torch.zeros(2, 70, 2, 64, dtype=DTYPE)}
    for declines in (integration._declines_intra, integration._declines_recompute):
        assert declines(arguments) is None
        assert "gk is None" in str(declines(arguments | {"gk": None}))
        assert "sums in float32" in str(declines(arguments | {"gk": given["g"]}))
        assert "K is 32" in str(declines(arguments | {"k": given["k"][..., :32]}))
    assert "chunk_size is 32" in str(integration._declines_intra(arguments | {"chunk_size": 32}))
    short = arguments | {"A": arguments["A"][..., :32]}
    assert "A has chunks of 32" in str(integration._declines_recompute(short))


def test_what_is_taken_is_what_there_are_kernels_for() -> None:
    from cute_attn.kernels.delta.chunk import spec
    from cute_attn.kernels.delta.step import spec as step_spec

    assert (integration.CHUNK, integration.DTYPES) == (spec.CHUNK, spec.DTYPES)
    for letter, name in (("K", "head_dim_k"), ("V", "head_dim_v")):
        assert integration.HEAD_DIMS[letter] == spec.ALLOWED[name]
        assert integration.STEP_HEAD_DIMS[letter] == step_spec.ALLOWED[name]
    assert spec.ALLOWED["gate_dtype"] == integration.GATE_DTYPES
    assert spec.ALLOWED["beta_dtype"] == integration.BETA_DTYPES
    steps = (integration.STEP_DTYPES, integration.STEP_STATE_DTYPES)
    assert steps == (step_spec.DTYPES, step_spec.STATE_DTYPES)


def test_importing_the_module_imports_neither_fla_nor_triton() -> None:
    code = (
        "import sys, cute_attn.integrations.fla as m\n"
        "assert callable(m.register) and not {'fla', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
