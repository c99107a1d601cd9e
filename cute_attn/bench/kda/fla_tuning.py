"""Preparation of flash-linear-attention for timing, because the autotuner alone would take minutes.

For every number of heads the autotuner compiles some 80 configurations, one after the other, and
times each configuration. `compile_peer` compiles the configurations in several processes
beforehand, so that the autotuner finds compiled kernels in Triton's cache. `bound_timing` shortens
the timing of each configuration. The norms' tuning key depends on the number of tokens: `share`
keeps the norms from being tuned for each size. On request, `share` also gives packed sequences the
choices for dense sequences. `keep_tuning` writes the choices to files that flash-linear-attention
reads (`FLA_CONFIG_DIR`), for later runs on the same kind of GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import operator
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import problem, training
from .cases import MEMORY_SHARE, Case

FEW_TOKENS = 512

_SHARE = """
import torch
from cute_attn.bench.kda import fla_tuning
from cute_attn.bench.kda.cases import Case
with torch.no_grad():
    fla_tuning.compile_share({kind!r}, {case!r}, {index}, {count}, tuned={tuned})
"""


def compiled_peer(
    kind: str, cases: Sequence[Case], args: argparse.Namespace
) -> tuple[bool, list[str]]:
    """Compile and tune the peer for `cases`. Returns whether the peer can be timed, and notes.

    The peer's autotuner chooses at the first call with a number of heads, whatever the number of
    tokens, so these cases are called first.
    """
    if args.no_peer:
        return False, ["FLA was left out (--no-peer)"]
    if args.peer_tuning:
        use_tuning(args.peer_tuning)
    if problem.peer("fla.ops.kda:chunk_kda") is None:
        return False, ["FLA was left out: flash-linear-attention cannot be imported"]
    notes = []
    if args.peer_rep:
        bound_timing(args.peer_rep)
        notes.append(f"FLA's autotuner timed each configuration for {args.peer_rep:g} ms")
    if args.peer_jobs:
        print(f"compiling FLA's kernels in {args.peer_jobs} processes", file=sys.stderr, flush=True)
        start = time.perf_counter()
        few = [replace(case, tokens=compile_tokens(case, args.peer_jobs)) for case in cases]
        compile_peer(kind, few, args.peer_jobs)
        print(f"compiled in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    for case in cases:
        start = time.perf_counter()
        if args.peer_share and case.sequences:
            share(tuners())
        with problem.freed(), contextlib.suppress(Exception):  # a later check reports the error
            warm(kind, case)
        seconds = time.perf_counter() - start
        print(f"FLA's first call, {case}: {seconds:.1f} s", file=sys.stderr, flush=True)
        share_norms()
    if args.peer_tuning:
        keep_tuning(args.peer_tuning)
    if args.peer_share:
        notes.append("FLA runs packed sequences with what its autotuner chose for dense ones")
    tuned = "; ".join(str(case) for case in cases if not (args.peer_share and case.sequences))
    return True, [f"FLA's autotuner chose at {tuned}", *notes]


def warm(kind: str, case: Case) -> None:
    """Call the peer once, so that the peer compiles and tunes."""
    call: problem.Call | None
    if kind == "training":
        step = training.steps(training.arguments(case), with_peer=True).get("fla")
        call = None if step is None else step.both
    elif kind == "chunk":
        call = problem.chunk_calls(problem.chunk_arguments(case), with_peer=True).get("fla")
    else:
        calls = {"intra": problem.intra_calls, "recompute": problem.recompute_calls}[kind]
        call = calls(problem.stage_arguments(case), with_peer=True).get("fla")
    if call is not None:
        call()
        torch.cuda.synchronize()


def compile_tokens(case: Case, jobs: int) -> int:
    """The tokens of a call that only compiles. The norms' kernels depend on the number of tokens,
    so the call has the case's tokens, unless `jobs` such calls at once need too much memory."""
    free, _ = torch.cuda.mem_get_info()
    return case.tokens if jobs * case.training_bytes <= MEMORY_SHARE * free else FEW_TOKENS


def compile_peer(kind: str, cases: Sequence[Case], jobs: int) -> None:
    """Fill Triton's cache with the peer's kernels for `cases`, in `jobs` processes."""
    shares = -(-jobs // max(1, len(cases)))
    waiting = [
        _SHARE.format(
            kind=kind, case=case, index=index, count=shares, tuned=_same_heads(case, cases[:i])
        )
        for i, case in enumerate(cases)
        for index in range(shares)
    ]
    running: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < jobs:
                child = subprocess.Popen([sys.executable, "-c", waiting.pop(0)])
                running.append(stack.enter_context(child))
                stack.callback(_end, child)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(0.5)
            running = [child for child in running if child.poll() is None]


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()


def _same_heads(case: Case, others: Sequence[Case]) -> bool:
    return any((one.heads, one.heads_v) == (case.heads, case.heads_v) for one in others)


def compile_share(kind: str, case: Case, index: int, count: int, *, tuned: bool) -> None:
    """Compile every count-th configuration of each kernel of a call, without launching the kernels.

    Args:
        tuned: another case with these heads has been compiled before. Kernels whose autotuner does
            not distinguish packed sequences then need one configuration, which the call compiles.
    """
    from triton.runtime.autotuner import Autotuner

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        known = tuned and "IS_VARLEN" not in self.keys
        if known and "token_parallel" not in self.base_fn.__name__:
            return
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        kwargs["warmup"] = True
        for config in self.prune_configs(kwargs)[index::count]:
            with contextlib.suppress(Exception):  # the autotuner drops what does not fit the GPU
                self.fn.run(*args, **kwargs, **config.all_kwargs())

    Autotuner.run = compile_only
    warm(kind, case)


# ---- the autotuner's choices


def bound_timing(rep_ms: float) -> None:
    """Make Triton's autotuner time each configuration for about `rep_ms` milliseconds."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    Autotuner.do_bench = staticmethod(partial(do_bench, warmup=rep_ms / 4, rep=rep_ms))


class Shared(dict[Any, Any]):
    """The choices of an autotuner. The choice with the most similar key serves a new key."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: Any) -> Any:
        return self[max(self, key=lambda known: sum(map(operator.eq, known, key)))]


def share_norms() -> None:
    """Let the first choice for a kernel of the norms serve every number of tokens."""
    share(tuner for tuner in tuners() if "NB" in tuner.keys)


def share(these: Iterable[Any]) -> None:
    """Let the choices that these autotuners have made so far serve all later calls."""
    for tuner in these:
        if tuner.cache and not isinstance(tuner.cache, Shared):
            tuner.cache = Shared(tuner.cache)


def tuners() -> list[Any]:
    """The autotuners of the peer's kernels in this process."""
    from fla.ops.utils.cache import CachedAutotuner

    return [x for x in gc.get_objects() if type(x) is CachedAutotuner]


def use_tuning(directory: Path) -> None:
    """Make the peer, which must not be imported yet, read its configurations from `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["FLA_CONFIG_DIR"] = str(directory)
    os.environ["FLA_CACHE_MODE"] = "strict"


def keep_tuning(directory: Path) -> None:
    """Add the choices of this process's autotuners to the files that `use_tuning` reads."""
    from fla.ops.utils.cache import AutotuneKey

    for tuner in tuners():
        entries = {
            AutotuneKey.key_hash(key): {
                "autotune_key": AutotuneKey.normalize_autotune_key(key),
                "config": {
                    "kwargs": config.kwargs,
                    "num_warps": config.num_warps,
                    "num_stages": config.num_stages,
                    "num_ctas": config.num_ctas,
                },
            }
            for key, config in tuner.cache.items()
        }
        if not entries:
            continue
        path = directory / f"{tuner.kernel_name}.json"
        known = json.loads(path.read_text()) if path.exists() else {"autotune_entries": {}}
        known["kernel_name"] = tuner.kernel_name
        known["autotune_entries"] |= entries
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
