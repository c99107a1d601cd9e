"""Compiles many kernels in parallel before they are needed; a failure does not stop the others."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from . import jit
from .arch import check_arch, current_arch
from .entry import Entry
from .errors import CacheError, CompileError
from .key import KernelDef, KeyDescription, describe
from .loader import load_libraries
from .log import logger, warn_once
from .plans import checked_requests
from .specfile import read_plan
from .store import Store
from .wire import NotPortable, encode_request
from .workers import Worker, addressed, name_of

_MOST_JOBS_BY_DEFAULT = 16  # a compiler process takes about 1 GB


class Failure(NamedTuple):
    """A kernel that failed to compile."""

    key: KeyDescription
    message: str


class WarmupReport(NamedTuple):
    """Result of `warmup`.

    Attributes:
        kernels: number of distinct kernels requested.
        compiled: keys of the kernels that this call compiled.
        found: number of kernels that were already in memory or on disk.
        failures: the kernels that failed, each with its message.
        seconds: duration of the call.
        refusals: a message for each table of a spec file that gave no kernel.
    """

    kernels: int
    compiled: tuple[KeyDescription, ...]
    found: int
    failures: tuple[Failure, ...]
    seconds: float
    refusals: tuple[str, ...] = ()


class WarmupError(CompileError):
    """Some kernels failed; all others are ready. `report` says which."""

    def __init__(self, report: WarmupReport) -> None:
        self.report = report
        messages = [*(failure.message for failure in report.failures), *report.refusals]
        title = f"{len(messages)} of {report.kernels + len(report.refusals)} kernels failed:"
        super().__init__("\n".join([title, *(f"- {message.strip()}" for message in messages)]))


class Job(NamedTuple):
    """One kernel to make ready."""

    kernel: KernelDef
    spec: Any
    key: KeyDescription


def warmup(
    requests: Iterable[tuple[KernelDef, Any]] | str | os.PathLike[str],
    *,
    arch: str | None = None,
    jobs: int | None = None,
    progress: bool | None = None,
) -> WarmupReport:
    """Load a list of kernels; kernels that are not cached are first compiled in parallel.

    Afterwards every kernel is in memory, and `cute_attn.cache.freeze` can be called.

    Args:
        requests: pairs of kernel and specialisation, or the path of a spec file. Duplicates are
            dropped; an empty list gives a warning.
        arch: by default `cute_attn.cache.current_arch`.
        jobs: number of processes that compile at once; by default one per CPU, at most 16. With 1
            job, or 1 kernel to compile, this process compiles.
        progress: whether to show a progress bar on stderr; by default if stderr is a terminal.

    Raises:
        CompileError: at the end, if kernels failed, or if a table of the file has no kernel for
            `arch` or was recorded by another version. The message names each failure; the
            attribute `report` has details.
        TypeError: as `cute_attn.cache.get`, or an argument has a wrong type.
        ValueError: `arch` is not of the form `sm_90a`, or `jobs` is less than 1.
        CacheError: as `cute_attn.cache.get`; or the file cannot be read, or lists nothing for
            `arch`.
    """
    arch = check_arch(current_arch() if arch is None else arch)
    check_jobs(jobs)
    pairs, refusals = _requested(requests, arch)
    work = unique_jobs((kernel, spec, arch) for kernel, spec in pairs)
    places = jit.Places.from_environment()
    load_libraries()
    started = time.perf_counter()
    problems: dict[KeyDescription, list[CacheError]] = {job.key: [] for job in work}
    missing = [job for job in work if not jit.is_cached(job.key, places, problems[job.key])]
    if missing:
        jit.refuse_if_frozen(missing[0].key, places, problems[missing[0].key])
    outcome = Outcome()
    if missing and places.store is not None:
        outcome = compile_all(missing, places.store, jobs=jobs, progress=progress)
    # Load the kernels that the workers stored; compile in this process the kernels that they could
    # not store.
    failures = [
        Failure(key, jit.with_reasons(message, problems[key])) for key, message in outcome.failures
    ]
    failed = {failure.key for failure in failures}
    for job in work:
        if job.key not in failed:
            try:
                jit.get(job.kernel, job.spec, arch)
            except CacheError as error:
                failures.append(Failure(job.key, str(error)))
    report = WarmupReport(
        kernels=len(work),
        compiled=tuple(job.key for job in missing if job.key not in {f.key for f in failures}),
        found=len(work) - len(missing),
        failures=tuple(failures),
        seconds=time.perf_counter() - started,
        refusals=tuple(refusals),
    )
    logger.info(
        "warmed up %d kernels in %.2f s: %d found, %d compiled, %d failed",
        report.kernels,
        report.seconds,
        report.found,
        len(report.compiled),
        len(failures) + len(refusals),
    )
    if not work and not refusals:
        logger.warning("a warm-up was asked for no kernel: nothing is loaded")
    if failures or refusals:
        raise WarmupError(report)
    return report


def _requested(
    requests: Iterable[tuple[KernelDef, Any]] | str | os.PathLike[str], arch: str
) -> tuple[list[tuple[KernelDef, Any]], list[str]]:
    """The requested pairs, and a message for each table of a file that gives no kernel."""
    if isinstance(requests, str | os.PathLike):
        plan = read_plan(requests, [arch])
        if not plan.requests:
            raise CacheError("\n".join(plan.refusals))
        return [(kernel, spec) for kernel, spec, _ in plan.requests], plan.refusals
    if not isinstance(requests, Iterable):
        raise TypeError(
            f"requests is {requests!r}, must be pairs of KernelDef and specialisation, or the path "
            "of a spec file"
        )
    return checked_requests(list(requests), "requests holds {}, must hold"), []


def check_jobs(jobs: int | None) -> None:
    """Raise TypeError or ValueError unless `jobs` is a number of processes, or None."""
    if jobs is None:
        return
    if type(jobs) is not int:
        raise TypeError(f"jobs is {jobs!r}, must be an int or None")
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}, must be at least 1")


def unique_jobs(requests: Iterable[tuple[KernelDef, Any, str]]) -> list[Job]:
    """The jobs for (kernel, specialisation, arch), each key once, in the given order."""
    jobs: dict[str, Job] = {}
    for kernel, spec, arch in requests:
        key = describe(kernel, spec, arch)
        jobs.setdefault(key.digest, Job(kernel, spec, key))
    return list(jobs.values())


class Outcome(NamedTuple):
    """Result of `compile_all`."""

    stored: tuple[KeyDescription, ...] = ()
    failures: tuple[Failure, ...] = ()


def compile_all(
    work: list[Job], store: Store, *, jobs: int | None = None, progress: bool | None = None
) -> Outcome:
    """Compile kernels into `store` in `jobs` processes. Failures are returned, not raised."""
    portable, local = [], []
    for job in work:
        request = _portable_request(job)
        if request is None:
            local.append(job)
        else:
            portable.append((job, request))
    default_jobs = min(len(os.sched_getaffinity(0)), _MOST_JOBS_BY_DEFAULT)
    workers = min(jobs or default_jobs, len(portable))
    if workers <= 1:
        local, portable = [*local, *(job for job, _ in portable)], []
    stored: list[KeyDescription] = []
    failures: list[Failure] = []
    with _progress_bar(len(work), progress) as advance:

        def done(job: Job, error: str | None) -> None:
            if error is None:
                stored.append(job.key)
            else:
                failures.append(Failure(job.key, error))
            advance(f"{job.key.kernel} {job.key.arch}")

        if portable:
            local += _run_workers(workers, portable, store, done)
        for job in local:
            done(job, _compile_here(job, store))
    return Outcome(tuple(stored), tuple(failures))


def _portable_request(job: Job) -> dict[str, Any] | None:
    try:
        return encode_request(job.kernel, job.spec)
    except NotPortable as error:
        logger.info("%s cannot be imported elsewhere: compiling it in this process", error)
        return None


def _compile_here(job: Job, store: Store) -> str | None:
    """Compile in this process; return the error, if any."""
    try:
        found = jit.obtain(*job, jit.verified, jit.Places((), store))
    except CacheError as error:
        return str(error)
    if isinstance(found, Entry):
        found.close()
        return None
    return f"{name_of(job.key)} could not be stored in {store.root}"


# -- worker processes


def _run_workers(
    number: int,
    work: list[tuple[Job, dict[str, Any]]],
    store: Store,
    done: Callable[[Job, str | None], None],
) -> list[Job]:
    """Compile in `number` processes; return the jobs left over if no process can be started."""
    pending: queue.SimpleQueue[tuple[Job, dict[str, Any]]] = queue.SimpleQueue()
    for item in work:
        pending.put(item)
    finished: queue.SimpleQueue[tuple[Job, str | None] | None] = queue.SimpleQueue()

    def feed_one_worker() -> None:
        worker: Worker | None = None
        try:
            while not pending.empty():
                if worker is None:
                    try:
                        worker = Worker()
                    except OSError as error:
                        topic = f"worker {error.errno}"
                        warn_once(topic, "no process can be started to compile in: %s", error)
                        return
                try:
                    job, request = pending.get_nowait()
                except queue.Empty:
                    return
                try:
                    answer = worker.ask(addressed(request, job.key, store))
                except Exception as error:
                    answer = {"error": f"{name_of(job.key)}: {type(error).__name__}: {error}"}
                if answer is None:  # killed, or crashed; the next job gets a new worker
                    ending = worker.close()
                    worker = None
                    finished.put((job, f"{name_of(job.key)}: {ending}"))
                elif "error" in answer:
                    finished.put((job, answer["error"]))
                else:
                    _account(job.key, answer)
                    finished.put((job, None))
        finally:
            try:
                if worker is not None:
                    worker.close()
            finally:
                finished.put(None)

    threads = [threading.Thread(target=feed_one_worker, daemon=True) for _ in range(number)]
    running = 0
    for thread in threads:
        with contextlib.suppress(RuntimeError):  # no thread can be started
            thread.start()
            running += 1
    while running:
        result = finished.get()
        if result is None:
            running -= 1
        else:
            done(*result)
    left = []
    with contextlib.suppress(queue.Empty):
        while True:
            left.append(pending.get_nowait()[0])
    return left


def _account(key: KeyDescription, answer: dict[str, Any]) -> None:
    if not answer["compiled"]:
        jit.count(waits=1)
        return
    jit.count(compiles=1, compile_seconds=answer["compile_seconds"])
    logger.info(
        "compiled %s in %.2f s, in another process", name_of(key), answer["compile_seconds"]
    )


@contextlib.contextmanager
def _progress_bar(total: int, show: bool | None) -> Iterator[Callable[[str], None]]:
    """A function to call with a label whenever one of `total` steps is done."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("compiling kernels", total=total)

        def advance(label: str) -> None:
            bar.update(task, advance=1, description=f"compiled {label}")

        yield advance
