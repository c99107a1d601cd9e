"""Bugs in other packages' kernels, shown by the emulator: docs/bugs_found.md tells of them.

    python -m tests.emulator.bugs_found [NAME ...]

compiles each kernel from the installed package (the extra `test`), runs it in the emulator on small
inputs under the schedules that show the bug, and prints findings and errors; then the same for the
kernel as a small change to its source makes it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from cute_attn.bench.peers import Captured, Request, missing
from cute_attn.bench.peers.flash_attention_4 import Edits, backward, mla_forward
from cute_attn.emulator import Emulator, Finding

from . import peer_results

ARCH = "sm_100a"
DIRECTORY = Path(__file__).parents[2] / "build" / "peers" / ARCH

Tensors = dict[str, torch.Tensor]
Schedule = tuple[str, int]  # and its seed


class Run(NamedTuple):
    """What one run gave: errors are relative to float64, in the Frobenius norm."""

    findings: list[Finding]
    errors: dict[str, float]


class Bug(NamedTuple):
    """A kernel, and what mends it.

    Attributes:
        request: makes the request for the kernel, given the edits.
        edits: of the package's source, without which the bug shows.
        schedules: under which it does.
        given: inputs for which it matters.
        exact: the outputs in float64.
    """

    request: Callable[[Edits], Request]
    edits: Edits
    schedules: Sequence[Schedule]
    given: Callable[[Captured], Tensors]
    exact: Callable[[Captured, Tensors], Tensors]

    def run(self, schedule: Schedule, *, mended: bool) -> Run:
        captured = self.request(self.edits if mended else ()).capture(DIRECTORY)
        given = self.given(captured)
        memory = captured.materialise(given)
        emulator = Emulator(schedule=schedule[0], seed=schedule[1], on_findings="collect")
        for buffer in captured.buffers.values():
            if buffer.role == "scratch":  # some get there as a bare address
                emulator.expose(memory.tensors[buffer.name], buffer.name)
        for call in captured.calls:
            image = call.function.object_file.read_bytes()
            emulator.load_object(image, call.function.ptx)(*memory.arguments(call))
        results = peer_results.results(captured, memory.tensors)
        errors = {
            name: peer_results.error(results[name], exact)
            for name, exact in self.exact(captured, given).items()
        }
        return Run(emulator.report.errors, errors)


# -- multi-head latent attention, forward, one CTA ------------------------------------------------

_MLA = "flash_attn.cute.flash_fwd_mla_1cta_sm100"
_RESCALED = "            cute.copy(thr_tmem_store, tOrO_t2r_frg, tOtO_r2t_cur)\n"
_WAIT_STORES: Edits = (
    (_MLA, _RESCALED, f"{_RESCALED}        cute.arch.fence_view_async_tmem_store()\n"),
)


def _mla_given(captured: Captured) -> Tensors:
    """Keys are visited from the last to the first: O is rescaled where earlier ones score higher,
    by a factor of 256 and more."""
    given = captured.random_inputs()
    given["q"] = torch.ones_like(given["q"])
    rows = given["k"].shape[1]
    given["k"][:] = torch.linspace(12.0, 0.0, rows).to(given["k"].dtype)[:, None, None]
    return given


def _mla_exact(captured: Captured, given: Tensors) -> Tensors:
    q = torch.cat([given["q"], given["qv"]], -1).double()
    k = torch.cat([given["k"], given["v"]], -1).double()
    scores = torch.einsum("bihd,bjkd->bhij", q, k) / math.sqrt(q.shape[-1])
    out = torch.einsum("bhij,bjkd->bihd", scores.softmax(-1), given["v"].double())
    return {"out": out, "lse": scores.logsumexp(-1).transpose(-1, -2)}


def _mla(heads: int, edits: Edits, *schedules: Schedule, one_cta: bool = True) -> Bug:
    return Bug(
        lambda edits: mla_forward(arch=ARCH, heads=heads, one_cta=one_cta, edits=edits),
        edits,
        schedules,
        _mla_given,
        _mla_exact,
    )


# -- the same with two CTAs -----------------------------------------------------------------------

_MLA_2CTA = "flash_attn.cute.flash_fwd_mla_sm100"
_ARRIVE = (
    "        pipeline.pipeline_init_arrive(cluster_shape_mn=cta_layout_vmnk, is_relaxed=True)\n"
)
_WAIT = "        pipeline.pipeline_init_wait(cluster_shape_mn=cta_layout_vmnk)\n"
_ARRIVE_LATER: Edits = ((_MLA_2CTA, _ARRIVE, ""), (_MLA_2CTA, _WAIT, _ARRIVE + _WAIT))


# -- backward, head dimension 128, two CTAs -------------------------------------------------------

_BACKWARD = "flash_attn.cute.flash_bwd_sm100"
_LAST_LOAD = "                            pipeline_dPsum.producer_tail(producer_state_dO_dPsum)\n"
_WAIT_KT = """\
                        if const_expr(self.use_2cta_instrs):
                            pipeline_Kt.sync_object_empty.wait(
                                producer_state_Kt.index, producer_state_Kt.phase
                            )
"""
_NEXT_TILE = """\
            tile_scheduler.advance_to_next_work()
            work_tile = tile_scheduler.get_current_work()

    @cute.jit
    def _dq_semaphore_lock_value("""
_WAIT_DS = """\
            if const_expr(self.use_2cta_instrs):
                pipeline_dS.producer_acquire(producer_state_dS)
"""


def _backward_exact(captured: Captured, given: Tensors) -> Tensors:
    expected = peer_results.expected(captured, given)
    return {name: expected[name].exact for name in expected}


BUGS = {
    "mla-forward-1cta": _mla(128, _WAIT_STORES, ("random", 1), ("adversarial", 0)),
    "mla-forward-1cta-kb64": _mla(64, _WAIT_STORES, ("random", 1), ("adversarial", 0)),
    # Under the other schedules it comes to a deadlock.
    "mla-forward-2cta": _mla(128, _ARRIVE_LATER, ("adversarial", 0), one_cta=False),
    "backward-hd128-2cta": Bug(
        lambda edits: backward(
            arch=ARCH, head_dim=128, heads=1, causal=True, seqlen_q=200, seqlen_k=333, edits=edits
        ),
        (
            (_BACKWARD, _LAST_LOAD, _LAST_LOAD + _WAIT_KT),
            (_BACKWARD, _NEXT_TILE, _WAIT_DS + _NEXT_TILE),
        ),
        [("adversarial", 0)],
        peer_results.inputs,
        _backward_exact,
    ),
}


def lines(run: Run) -> Iterator[str]:
    yield "    errors: " + ", ".join(f"{name} {error:.1e}" for name, error in run.errors.items())
    shown = {(finding.check, finding.line): finding for finding in run.findings}
    yield f"    {len(run.findings)} findings" + (":" if shown else "")
    for finding in list(shown.values())[:3]:
        yield f"      {finding.check}: {finding.message}, PTX line {finding.line}"


def main(names: Sequence[str]) -> None:
    for name in names or BUGS:
        bug = BUGS[name]
        request = bug.request(())
        if reason := missing(request.peer):
            raise SystemExit(reason)
        print(f"{name}: {request.name}")
        for mended in (False, True):
            for schedule, seed in bug.schedules:
                print(f"  {'mended' if mended else 'as released'}, {schedule}, seed {seed}")
                print("\n".join(lines(bug.run((schedule, seed), mended=mended))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
