"""The command line: `python -m cute_attn.cache`.

Exit status: 0 for success; 1 if something is damaged, refused, missing, cannot be removed or did
not compile; 2 for invalid arguments; 141 if the reader has closed the output's pipe.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import jit, settings, toolchain
from .arch import check_arch
from .entry import Entry, KernelUse
from .errors import CacheError
from .specfile import read_plan
from .store import Evicted, Store, noting
from .warm import check_jobs, compile_all, unique_jobs

_CLOSED_PIPE = 141  # a shell's status for a program killed by SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if "run" not in options:
            parser.print_help()
            return 0
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has closed the pipe, so Python's flush at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except (CacheError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cute_attn.cache",
        description="Look after the cache of compiled kernels, and build prebuilt ones.",
    )
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Any, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.set_defaults(run=run)
        return sub

    path = command("path", _path, "print the user's cache directory")
    path.add_argument(
        "--runtime-library",
        action="store_true",
        help="print the library that compiled kernels call, for CUTE_ATTN_RUNTIME_LIBRARY",
    )
    listing = command("ls", _list, "list all entries, in the user's and the prebuilt directories")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.add_argument(
        "--wide", action="store_true", help="do not shorten specialisations to fit the line"
    )
    info = command("info", _info, "show everything about one entry")
    info.add_argument("key", metavar="KEY", help="a digest, or its first characters")
    info.add_argument("--json", action="store_true", help="print JSON")
    verify = command("verify", _verify, "compare every file with its SHA-256")
    verify.add_argument("--json", action="store_true", help="print JSON")
    prune = command("prune", _prune, "remove least recently used entries, and leftovers")
    prune.add_argument(
        "--max-bytes",
        type=_size,
        metavar="SIZE",
        help="what may remain, such as 500M (default: CUTE_ATTN_CACHE_MAX_BYTES, or 5 GiB)",
    )
    prune.add_argument("--json", action="store_true", help="print JSON")
    clear = command("clear", _clear, "remove all entries that no process has loaded")
    clear.add_argument("--json", action="store_true", help="print JSON")
    build = command("build", _build, "compile the kernels that a file asks for into a directory")
    build.add_argument("spec", metavar="SPEC.toml", type=Path)
    build.add_argument(
        "--arch", required=True, type=_architectures, help="such as sm_90a,sm_100a", metavar="ARCHS"
    )
    build.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="for CUTE_ATTN_PREBUILT"
    )
    build.add_argument(
        "-j", "--jobs", type=_jobs, metavar="N", help="processes (default: one per CPU, at most 16)"
    )
    return parser


def _size(text: str) -> int:
    try:
        return settings.parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _architectures(text: str) -> list[str]:
    try:
        return [check_arch(item.strip()) for item in text.split(",")]
    except (ValueError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _jobs(text: str) -> int:
    try:
        check_jobs(jobs := int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1") from None
    return jobs


# -- commands


def _path(options: argparse.Namespace) -> int:
    print(toolchain.runtime_library().path if options.runtime_library else _user_store().root)
    return 0


def _list(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for store in _stores():
        contents = store.contents()
        problems += contents.problems
        for digest in contents.digests:
            with noting(problems):
                entry = store.open(digest)
                if entry is not None:
                    with contextlib.closing(entry):
                        rows.append(_summary(entry))
    rows.sort(key=lambda row: (row["kernel"], row["specialisation"], row["arch"]))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        _print_entries(rows, None if options.wide else shutil.get_terminal_size((120, 24)).columns)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _print_entries(rows: list[dict[str, Any]], width: int | None) -> None:
    """Print a line for each entry, at most `width` wide. (A table of thousands would take
    seconds.)"""
    now = time.time()
    columns = ("key", "kernel", "arch", "size", "age", "hits", "specialisation")
    lines = [
        (
            row["key"][:12],
            row["kernel"],
            row["arch"],
            _readable_size(row["bytes"]),
            _readable_age(now - row["last_use"]),
            str(row["hits"]),
            row["specialisation"],
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)][:-1]
    for line in (columns, *lines):
        cells = [cell.ljust(size) for cell, size in zip(line, widths, strict=False)]
        text = "  ".join([*cells, line[-1]])
        print(text if width is None or len(text) <= width else f"{text[: max(width - 3, 0)]}...")
    print(f"{len(rows)} entries, {_readable_size(sum(row['bytes'] for row in rows))}")


def _info(options: argparse.Namespace) -> int:
    with contextlib.closing(_find(options.key)) as entry:
        hits, last_use = entry.uses()
        everything = {
            "path": str(entry.directory),
            **entry.meta,
            "hits": hits,
            "last_use": last_use,
        }
        if options.json:
            print(json.dumps(everything, indent=1))
            return 0
        print(f"path: {entry.directory}\ndigest: {entry.digest}\n{entry.key.text}", end="")
        print(f"compile time: {entry.meta['compile_seconds']:.2f} s")
        print(f"hits: {hits}, last use {_readable_age(time.time() - last_use)} ago")
        for name, file in entry.meta["files"].items():
            print(f"file {name}: {file['size']} bytes, SHA-256 {file['sha256']}")
        for use in entry.kernels:
            print(
                f"kernel {use.name}: {use.registers} registers, {use.spills} bytes spilled, "
                f"{use.stack} bytes of stack, shared memory {use.static_shared} bytes static, "
                f"{'computed' if use.dynamic_shared is None else use.dynamic_shared} dynamic"
            )
    return 0


def _verify(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for store in _stores():
        contents = store.contents()
        rows += [
            {"path": str(store.root), "key": None, "problem": problem}
            for problem in contents.problems
        ]
        for digest in contents.digests:
            problem = None
            try:
                entry = store.open(digest)
                if entry is None:
                    continue  # evicted after the listing
                with contextlib.closing(entry):
                    entry.verify()
            except (CacheError, OSError) as error:
                problem = str(error)
            rows.append({"path": str(store.entry_path(digest)), "key": digest, "problem": problem})
    damaged = [row for row in rows if row["problem"]]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in damaged:
            print(row["problem"])
        print(f"{len(rows) - len(damaged)} entries intact, {len(damaged)} damaged or refused")
    return 1 if damaged else 0


def _prune(options: argparse.Namespace) -> int:
    store = _user_store()
    limit = settings.max_bytes() if options.max_bytes is None else options.max_bytes
    leftovers = store.sweep()
    return _report_removal(store.evict(limit), options, leftovers)


def _clear(options: argparse.Namespace) -> int:
    return _report_removal(_user_store().clear(), options)


def _report_removal(
    removed: Evicted, options: argparse.Namespace, leftovers: int | None = None
) -> int:
    if options.json:
        swept = {} if leftovers is None else {"leftovers": leftovers}
        print(json.dumps({**removed._asdict(), **swept}, indent=1))
    else:
        text = f"removed {removed.entries} entries, {_readable_size(removed.bytes)}"
        if leftovers is not None:
            text += f", and {leftovers} leftovers of dead processes"
        if removed.in_use:
            text += f"; {removed.in_use} are in use, and stay"
        print(text)
        for problem in removed.problems:
            print(f"error: {problem}", file=sys.stderr)
    return 1 if removed.problems else 0


def _build(options: argparse.Namespace) -> int:
    import rich.table  # noqa: F401 - if it is missing, that is an error before hours of work

    started = time.perf_counter()
    plan = read_plan(options.spec, options.arch)
    if not plan.requests:
        raise CacheError("\nerror: ".join(plan.refusals))
    work = unique_jobs(plan.requests)
    store = Store(options.out.absolute(), public=True)
    store.check_writable()
    outcome = compile_all(work, store, jobs=options.jobs)
    store.tidy()
    rows = []
    for key in outcome.stored:
        entry = store.open(key.digest)
        if entry is None:
            raise CacheError(f"{store.entry_path(key.digest)} was removed while building")
        with contextlib.closing(entry):
            rows += [
                (
                    key.kernel,
                    key.specialisation,
                    key.arch,
                    str(use.registers),
                    "?" if use.spills is None else str(use.spills),
                    _shared_memory(use),
                    f"{entry.meta['compile_seconds']:.2f} s",
                    _readable_size(entry.size),
                )
                for use in entry.kernels
            ]
    columns = ("kernel", "specialisation", "arch", "registers", "spilled bytes", "smem")
    _print_table((*columns, "compile time", "size"), sorted(rows))
    seconds = time.perf_counter() - started
    print(f"{len(outcome.stored)} of {len(work)} kernels in {store.root}, {seconds:.1f} s")
    for message in [*plan.refusals, *(failure.message for failure in outcome.failures)]:
        print(f"error: {message}", file=sys.stderr)
    return 1 if plan.refusals or len(outcome.stored) < len(work) else 0


# -- helpers


def _user_store() -> Store:
    directory = settings.cache_directory()
    if directory is None:
        raise CacheError("no home directory, and CUTE_ATTN_CACHE_DIR is not set")
    return Store(directory)


def _stores() -> Iterable[Store]:
    return jit.Places.from_environment().all()


def _find(prefix: str) -> Entry:
    """The entry whose digest begins with `prefix`; of several copies, the copy that `get` loads."""
    found: dict[str, Store] = {}
    for store in _stores():
        for digest in store.digests():
            if digest.startswith(prefix):
                found.setdefault(digest, store)
    if len(found) != 1:
        raise CacheError(
            f"{len(found)} entries have a key that begins with {prefix!r}"
            + "".join(f"\n{digest}" for digest in sorted(found))
        )
    ((digest, store),) = found.items()
    entry = store.open(digest)
    if entry is None:
        raise CacheError(f"{digest} has just been removed")
    return entry


def _summary(entry: Entry) -> dict[str, Any]:
    hits, last_use = entry.uses()
    return {
        "key": entry.digest,
        "kernel": entry.key.kernel,
        "specialisation": entry.key.specialisation,
        "arch": entry.key.arch,
        "bytes": entry.size,
        "last_use": last_use,
        "hits": hits,
        "path": str(entry.directory),
    }


def _shared_memory(use: KernelUse) -> str:
    if use.dynamic_shared is None:
        return f"{use.static_shared}+?"
    return str(use.static_shared + use.dynamic_shared)


def _print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # a pipe has no width, and grep wants whole rows
    console.print(table, markup=False)


def _readable_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _readable_age(seconds: float) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


if __name__ == "__main__":
    sys.exit(main())
