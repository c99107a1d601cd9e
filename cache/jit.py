"""Finds a kernel's function in memory, in prebuilt directories or in the user's, or compiles the
kernel."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import resource
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from . import fingerprint, settings, toolchain, tracing
from .arch import check_arch, current_arch
from .entry import PTX, Built, Entry
from .errors import CacheError, CompileError, DamagedEntry, FrozenCacheMiss, RefusedEntry
from .key import KernelDef, KeyDescription, admits, describe, have_one_text, spec_items
from .loader import IncompatibleEntry, load, load_libraries
from .log import logger, warn_once
from .memory import Function, forget, functions, functions_by_digest, functions_by_text, remember
from .store import Store

_Result = TypeVar("_Result")
_Use = Callable[[Entry | Built], _Result]

_lock = threading.Lock()
# The entries loaded last, at most `_most_held()`. Each entry holds a descriptor, whose lock
# prevents eviction.
_entries_in_use: collections.deque[Entry] = collections.deque()
_MOST_ENTRIES_HELD = 64
# How many of the nearest keys, and of the entries that cannot be used, an error names.
_SHOWN_KEYS, _SHOWN_PROBLEMS = 3, 10
_digest_locks: dict[str, threading.Lock] = {}
_frozen = False


class _ThisThread(threading.local):
    """Keys of the kernels that this thread is getting; several if a constructor asks for more
    kernels."""

    def __init__(self) -> None:
        self.keys: list[KeyDescription] = []


_this_thread = _ThisThread()


def _after_fork_in_child() -> None:
    """Replace the locks that threads of the parent may have held."""
    global _lock
    _lock = threading.Lock()
    _digest_locks.clear()
    _indexes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Stats(NamedTuple):
    """Counters of this process since it started, or since `reset_stats`.

    Look-ups in memory are not counted: that path takes no lock and writes nothing.

    Attributes:
        compiles: kernels compiled.
        compile_seconds: total time of these compilations.
        disk_hits: kernels found in the user's directory.
        prebuilt_hits: kernels found in prebuilt directories.
        waits: kernels that another process compiled while this one waited.
        quarantined: damaged entries put aside.
        memory_only: compiled kernels that could not be stored.
        failures: compilations that failed.
        evicted: entries evicted.
    """

    compiles: int = 0
    compile_seconds: float = 0.0
    disk_hits: int = 0
    prebuilt_hits: int = 0
    waits: int = 0
    quarantined: int = 0
    memory_only: int = 0
    failures: int = 0
    evicted: int = 0


_stats = Stats()


def stats() -> Stats:
    """A snapshot of the counters."""
    return _stats


def reset_stats() -> None:
    """Set the counters to zero."""
    global _stats
    with _lock:
        _stats = Stats()


def count(**increments: float) -> None:
    """Add to the counters."""
    global _stats
    with _lock:
        _stats = _stats._replace(
            **{name: getattr(_stats, name) + n for name, n in increments.items()}
        )


def get(kernel: KernelDef, spec: Any, arch: str | None = None) -> Function:
    """The compiled function of a kernel: a TVM-FFI function, called with tensors and numbers.

    The search goes through memory, the directories of `CUTE_ATTN_PREBUILT` and the user's cache
    directory. A kernel that is not found is compiled and stored in the user's directory. Any thread
    may call this.

    Args:
        kernel: the kernel.
        spec: a frozen dataclass of plain values (see `cute_attn.cache.spec`).
        arch: architecture, such as `"sm_90a"`; by default `current_arch`.

    Raises:
        TypeError: a field of the specialisation is not a plain value.
        CompileError: the kernel does not compile.
        FrozenCacheMiss: the kernel would have to be compiled after `freeze`.
        CacheError: neither a device nor `arch` is given, or the runtime library is missing.
    """
    if arch is None:
        arch = current_arch()
    try:
        known, function = functions[kernel, spec, arch]
    except (KeyError, TypeError):  # TypeError: not hashable, which `describe` explains
        known = function = None
    if known is spec and function is not None:
        return function
    return _get_other(kernel, spec, arch, known, function)


def _get_other(
    kernel: KernelDef, spec: Any, arch: str, known: Any, function: Function | None
) -> Function:
    """The function of `spec` if it is not the object `known`, which `function` was loaded for.

    `known` equals `spec`. `known` and `function` are None if no such function is in memory.
    """
    if function is not None:
        if have_one_text(spec, known):
            return function
        other = functions_by_text.get((kernel, type(spec), spec_items(spec), arch))
        if other is not None:
            return other
    return _get_missing(kernel, spec, arch)


def _get_missing(kernel: KernelDef, spec: Any, arch: str) -> Function:
    key = describe(kernel, spec, check_arch(arch))
    load_libraries()
    with _getting(key), _digest_lock(key.digest):
        known = functions_by_digest.get(key.digest)
        function = known[1] if known else obtain(kernel, spec, key, _load_for_good)
        remember(kernel, spec, arch, key, function)
    _record(kernel, spec, arch)
    return function


def _record(kernel: KernelDef, spec: Any, arch: str) -> None:
    path = settings.record_path()
    if path is None:
        return
    from .recording import record_use  # imported here, because a hit does not need it

    record_use(path, kernel, spec, arch)


@contextlib.contextmanager
def _getting(key: KeyDescription) -> Iterator[None]:
    """Raise CompileError if getting this kernel while another compiles would be a deadlock.

    A kernel's constructor may ask for other kernels. The kernel's traced code may not ask, because
    the compiler compiles one kernel at a time. The process that compiles the other kernel may even
    be waiting for this kernel.
    """
    traced = tracing.this_thread.kernel
    if traced is not None:
        raise CompileError(
            f"{traced} asks for {key.kernel} {key.specialisation} while it is being traced: a "
            "kernel asks for others in its constructor"
        )
    if any(key.digest == other.digest for other in _this_thread.keys):
        chain = " -> ".join(other.kernel for other in [*_this_thread.keys, key])
        raise CompileError(
            f"{key.kernel} {key.specialisation} needs itself to be compiled: {chain}"
        )
    _this_thread.keys.append(key)
    try:
        yield
    finally:
        _this_thread.keys.remove(key)


def compile(  # noqa: A001 (cache.compile is what it does)
    kernel: KernelDef, spec: Any, arch: str | None = None
) -> Entry | Built:
    """Compile a kernel unless an entry has it, without loading the kernel; return the entry.

    The entry (`directory`, `key`, `kernels`, `read("kernel.ptx")`) is the entry that `get` would
    load, with all files verified, or a new entry. If nothing can be stored, the result is a
    `Built`, with the attributes of an entry, but with its files in memory and None for `directory`.

    Needs no GPU if `arch` is given.

    Args:
        kernel: as for `get`.
        spec: as for `get`.
        arch: as for `get`.

    Raises:
        TypeError: as `get`.
        CompileError: as `get`.
        FrozenCacheMiss: as `get`.
        CacheError: as `get`.
    """
    key = describe(kernel, spec, check_arch(arch or current_arch()))
    with _getting(key):
        return obtain(kernel, spec, key, verified)


def is_cached(key: KeyDescription, places: Places, problems: list[CacheError]) -> bool:
    """Whether the kernel is in memory or on disk; an entry on disk may still turn out to be
    damaged.

    The reasons why entries cannot be used are added to `problems`.
    """
    if key.digest in functions_by_digest:
        return True
    return any(_find(store, key, lambda _: True, problems, counted=False) for store in places.all())


def verified(entry: Entry | Built) -> Entry | Built:
    """Return `entry` after checking all its files. Raises DamagedEntry or RefusedEntry."""
    if isinstance(entry, Entry):
        entry.verify()
    return entry


def _load_for_good(entry: Entry | Built) -> Function:
    function = load(entry)
    if isinstance(entry, Entry):
        with _lock:
            _entries_in_use.append(entry)
            let_go = [_entries_in_use.popleft()] if len(_entries_in_use) > _most_held() else []
        for other in let_go:
            other.close()
    return function


def _most_held() -> int:
    """How many entries may each hold a descriptor: at most 1/16 of the process's limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = limit == resource.RLIM_INFINITY
    return _MOST_ENTRIES_HELD if unlimited else max(1, min(_MOST_ENTRIES_HELD, limit // 16))


def _digest_lock(digest: str) -> threading.Lock:
    with _lock:
        return _digest_locks.setdefault(digest, threading.Lock())


def clear_memory() -> None:
    """Forget the functions in memory, the hashes of sources, and the versions of packages.

    Entries on disk stay, and functions that callers hold remain valid.
    """
    forget()
    with _lock:
        _indexes.clear()
    fingerprint.fingerprint.cache_clear()
    toolchain.forget()


def freeze() -> None:
    """Make every later call that would have to compile a kernel raise `FrozenCacheMiss`.

    A server calls this when it starts to serve. Entries on disk can still be loaded, in
    milliseconds.
    """
    global _frozen
    _frozen = True


def unfreeze() -> None:
    """Undo `freeze`."""
    global _frozen
    _frozen = False


def is_frozen() -> bool:
    """Whether `freeze` is in force."""
    return _frozen


# -- the slow path


class Places(NamedTuple):
    """The stores in which entries are looked for: prebuilt stores, and the store for new
    entries."""

    prebuilt: tuple[Store, ...]
    store: Store | None

    @classmethod
    def from_environment(cls) -> Places:
        """`CUTE_ATTN_PREBUILT` and the user's cache directory."""
        paths = settings.prebuilt_directories()
        return cls(tuple(Store(path, read_only=True) for path in paths), _user_store())

    def all(self) -> tuple[Store, ...]:
        return (*self.prebuilt, self.store) if self.store else self.prebuilt


def _user_store() -> Store | None:
    directory = settings.cache_directory()
    if directory is not None:
        return Store(directory)
    warn_once(
        "no home",
        "no home directory, and CUTE_ATTN_CACHE_DIR is not set: compiled kernels stay in memory",
    )
    return None


def obtain(
    kernel: KernelDef,
    spec: Any,
    key: KeyDescription,
    use: _Use[_Result],
    places: Places | None = None,
) -> _Result:
    """Find the kernel's entry, or compile the kernel; return the result of `use` for the entry.

    `use` raises DamagedEntry or RefusedEntry for an entry that must not be used. If the compiled
    kernel cannot be stored, `use` gets the `Built` in memory.
    """
    places = places or Places.from_environment()
    problems: list[CacheError] = []  # problems with entries of this key
    for prebuilt in places.prebuilt:
        result = _find(prebuilt, key, use, problems)
        if result is not None:
            count(prebuilt_hits=1)
            return result
    store = places.store
    if store is None:
        refuse_if_frozen(key, places, problems)
        built = _compile(kernel, spec, key, places, problems)
        count(memory_only=1)
        return use(built)

    result = _find(store, key, use, problems)
    if result is not None:
        count(disk_hits=1)
        return result
    refuse_if_frozen(key, places, problems)

    def published() -> bool:
        nonlocal result
        result = _find(store, key, use, problems)
        return result is not None

    started = time.perf_counter()
    with store.compiling(key.digest, published):
        if result is None:
            result = _find(store, key, use, problems, locked=True)
        if result is not None:
            count(waits=1, disk_hits=1)
            seconds = time.perf_counter() - started
            logger.info("another process compiled %s; waited %.2f s", key.kernel, seconds)
            return result
        built = _compile(kernel, spec, key, places, problems)
        return _store(store, kernel, spec, built, use)


def _find(
    store: Store,
    key: KeyDescription,
    use: _Use[_Result],
    problems: list[CacheError],
    *,
    locked: bool = False,
    counted: bool = True,
) -> _Result | None:
    """The result of `use` for the entry of a key, or None if the store has no usable entry.

    The reasons why entries were passed over are added to `problems`. Damaged entries go to the
    quarantine if the caller holds the lock of `key` (`locked`). They also go there if `key` is open
    (`KeyDescription.is_open`). Without `counted`, a result does not count as a use of its entry.
    """
    put_aside = _put_aside if locked else None
    if key.is_open:  # nobody compiles under the lock of the entry's own key
        put_aside = _lock_and_put_aside
    for digest in _candidates(store, key, problems):
        started = time.perf_counter()
        try:
            entry = store.open(digest)
        except OSError as error:
            _warn_unreadable(store, error, problems)
            return None
        except (DamagedEntry, RefusedEntry) as problem:
            _pass_over(store, digest, problem, problems, put_aside)
            continue
        if entry is None:
            continue
        try:
            result = use(entry)
        except IncompatibleEntry as problem:
            entry.close()
            _add(problem, problems)
            warn_once(f"incompatible {entry.directory}", "%s", problem)
            continue
        except (DamagedEntry, RefusedEntry) as problem:
            entry.close()
            _pass_over(store, digest, problem, problems, put_aside)
            continue
        except BaseException:
            entry.close()
            raise
        if not counted:
            entry.close()
            return result
        if not store.read_only:
            entry.record_use()
        milliseconds = 1e3 * (time.perf_counter() - started)
        logger.info(
            "hit: %s for %s from %s in %.1f ms",
            entry.key.kernel,
            entry.key.arch,
            entry.directory,
            milliseconds,
        )
        return result
    return None


def _pass_over(
    store: Store,
    digest: str,
    problem: CacheError,
    problems: list[CacheError],
    put_aside: Callable[[Store, str, CacheError], None] | None,
) -> None:
    """Note a damaged or refused entry; `put_aside` moves it to the quarantine."""
    _add(problem, problems)
    if store.read_only:
        warn_once(f"prebuilt {problem}", "passed over: %s", problem)
    elif put_aside is not None:
        put_aside(store, digest, problem)


def _lock_and_put_aside(store: Store, digest: str, problem: CacheError) -> None:
    """`_put_aside` under the lock of the entry's key, if the entry is still damaged then."""
    with store.locked(digest) as held:
        if not held:
            warn_once(f"damaged {problem}", "%s", problem)
        elif _is_bad(store, digest):
            _put_aside(store, digest, problem)


def _is_bad(store: Store, digest: str) -> bool:
    """Whether an entry is damaged or refused."""
    try:
        entry = store.open(digest)
        if entry is not None:
            with contextlib.closing(entry):
                entry.verify()
    except (DamagedEntry, RefusedEntry):
        return True
    except (OSError, CacheError):
        return False
    return False


def _add(problem: CacheError, problems: list[CacheError]) -> None:
    """Add a problem unless an equal problem is listed: entries are looked for several times."""
    if str(problem) not in map(str, problems):
        problems.append(problem)


def _candidates(store: Store, key: KeyDescription, problems: list[CacheError]) -> Iterator[str]:
    """The digests under which a store may hold the kernel, best first.

    With a compiler installed there is one candidate. Without a compiler, its version and perhaps
    its CUDA flavour are unknown, and every entry that agrees in all other fields is a candidate.
    Entries built with the runtime library's version come first, then the newest. Entries whose key
    cannot be read are passed over, and added to `problems`, because one of these entries may be the
    kernel's.
    """
    if not key.is_open:
        yield key.digest
        return
    with _lock:
        index = _indexes.setdefault(store.root, _Index())
    preferred = toolchain.runtime_version()
    tried: set[str] = set()
    for refresh in (False, True):  # list the store only if the known entries do not suffice
        if refresh:
            index.read(store, problems)
        matching = [found for found in index.matching(key) if found.digest not in tried]
        matching.sort(key=lambda k: (k.dsl == preferred, _version_tuple(k.dsl)), reverse=True)
        for found in matching:
            tried.add(found.digest)
            yield found.digest


class _Known(NamedTuple):
    """An entry's digest, and the versions with which the entry was built."""

    toolchain: tuple[str | None, ...]
    digest: str

    @property
    def dsl(self) -> str:
        return self.toolchain[0] or ""


class _Index:
    """The entries of a store by the digest of their key without the compiler's fields.

    Opening an entry takes a quarter of a millisecond, so each entry is opened only once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._by_open_digest: dict[str, list[_Known]] = {}

    def read(self, store: Store, problems: list[CacheError]) -> None:
        """Add the entries that are new in the store; pass over entries that cannot be read."""
        bad: list[tuple[str, CacheError]] = []
        with self._lock:
            for key in _readable_keys(store, self._known, bad, problems):
                self._known.add(key.digest)
                entry = _Known(key.toolchain, key.digest)
                self._by_open_digest.setdefault(key.opened().digest, []).append(entry)
        for digest, problem in bad:
            _pass_over(store, digest, problem, problems, _lock_and_put_aside)

    def matching(self, key: KeyDescription) -> list[_Known]:
        with self._lock:
            agreeing = self._by_open_digest.get(key.opened().digest, ())
            return [entry for entry in agreeing if admits(key.toolchain, entry.toolchain)]


# Root of the store -> its index.
_indexes: dict[Path, _Index] = {}


def _readable_keys(
    store: Store,
    leave_out: Collection[str] = (),
    bad: list[tuple[str, CacheError]] | None = None,
    problems: list[CacheError] | None = None,
) -> Iterator[KeyDescription]:
    """The keys of all entries that can be opened. Warns if the store itself cannot be read.

    Digests of damaged and refused entries are added to `bad`; the reason why the store cannot be
    read is added to `problems`.
    """
    contents = store.contents()
    for text in contents.problems:
        _warn_unreadable(store, text, problems)
    for digest in contents.digests:
        if digest in leave_out:
            continue
        try:
            entry = store.open(digest)
        except OSError as error:
            logger.debug("passed over: %s", error)
        except CacheError as problem:
            if bad is not None:
                bad.append((digest, problem))
        else:
            if entry is not None:
                entry.close()
                yield entry.key


def _warn_unreadable(store: Store, error: object, problems: list[CacheError] | None = None) -> None:
    warn_once(f"unreadable {store.root}", "%s cannot be read: %s", store.root, error)
    if problems is not None:
        _add(CacheError(f"{store.root} cannot be read: {error}"), problems)


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _put_aside(store: Store, digest: str, problem: CacheError) -> None:
    """Report a damaged or refused entry, and move it to the quarantine if possible."""
    try:
        done = store.quarantine(digest)
    except RefusedEntry:
        return  # the whole store is refused, which is reported when the kernel cannot be stored
    except OSError as error:
        warn_once(f"damaged {problem}", "%s; it cannot be moved aside: %s", problem, error)
        return
    if done is not None:
        count(quarantined=1)
        logger.warning("%s; %s", problem, done)


def _compile(
    kernel: KernelDef,
    spec: Any,
    key: KeyDescription,
    places: Places,
    problems: Collection[CacheError],
) -> Built:
    """Compile a kernel that has no entry. A CompileError says why no entry could be used."""
    from . import compiler  # a hit needs no compiler

    store = places.store
    logger.info("compiling %s %s for %s", key.kernel, key.specialisation, key.arch)
    with contextlib.ExitStack() as stack:
        scratch = None
        if store is not None:
            with contextlib.suppress(OSError, RefusedEntry):  # _store reports it
                scratch = stack.enter_context(store.staging())
        try:
            if compiler.is_interrupted():
                from .workers import compile_elsewhere  # seldom needed

                built = compile_elsewhere(kernel, spec, key)
            else:
                built = compiler.compile_kernel(kernel, spec, key, scratch)
        except CompileError as error:
            count(failures=1)
            missing = isinstance(error.__cause__, compiler.CompilerMissing)
            reasons = _reasons(key, places, problems) if missing else _not_usable(problems)
            raise CompileError("\n".join([str(error), *reasons])) from error.__cause__
    count(compiles=1, compile_seconds=built.compile_seconds)
    uses = (f"{use.registers} registers, {use.spills} bytes spilled" for use in built.kernels)
    logger.info(
        "compiled %s %s for %s in %.2f s (%s), key %s",
        key.kernel,
        key.specialisation,
        key.arch,
        built.compile_seconds,
        "; ".join(uses),
        key.digest[:12],
    )
    return built


def _store(store: Store, kernel: KernelDef, spec: Any, built: Built, use: _Use[_Result]) -> _Result:
    """Publish a compiled kernel and `use` the entry. If publishing fails, `use` the `Built` in
    memory."""
    try:
        if PTX not in built.files:
            raise CacheError("no directory has room to compile in")
        if _sources_changed(kernel, spec, built.key):
            raise CacheError("its sources changed while it was compiled")
        store.publish(built)
        entry = store.open(built.digest)
        if entry is None:
            raise CacheError("another process removed it at once")
        result = use(entry)
    except (OSError, CacheError) as error:
        count(memory_only=1)
        warn_once(
            f"unstored {store.root}",
            "%s stays in memory, and the next process will compile it again: %s",
            built.key.kernel,
            error,
        )
        return use(built)
    with contextlib.suppress(OSError, CacheError):  # the kernel is stored already
        count(evicted=store.make_room(settings.max_bytes_or_default(), built.digest).entries)
        store.sweep()
    return result


def _sources_changed(kernel: KernelDef, spec: Any, key: KeyDescription) -> bool:
    """Whether a source file was edited between making the key and compiling."""
    read = fingerprint.read_fingerprint(
        kernel.module, kernel.source_package, kernel.sources, type(spec).__module__
    )
    return read.sources != key.sources


def refuse_if_frozen(
    key: KeyDescription, places: Places, problems: Collection[CacheError] = ()
) -> None:
    """Raise FrozenCacheMiss if `freeze` is in force."""
    if _frozen:
        raise FrozenCacheMiss(_describe_miss(key, places, problems))


def _describe_miss(key: KeyDescription, places: Places, problems: Collection[CacheError]) -> str:
    lines = [
        f"{key.kernel} {key.specialisation} for {key.arch} is in no cache, and compiling it is "
        "forbidden since cache.freeze()",
        _describe_key(key),
        *_reasons(key, places, problems),
    ]
    return "\n".join(lines)


def _reasons(key: KeyDescription, places: Places, problems: Collection[CacheError]) -> list[str]:
    """Lines that say why no entry serves a key: the unusable entries, and the nearest keys."""
    known = {digest: found for digest, (found, _) in functions_by_digest.items()}
    for store in places.all():
        known.update((found.digest, found) for found in _readable_keys(store))
    nearest = sorted(
        (found for found in known.values() if found.kernel == key.kernel),
        key=lambda found: len(key.differences(found)),
    )
    lines = _not_usable(problems)
    lines += [
        f"nearest key {found.digest[:12]} differs in {'; '.join(key.differences(found))}"
        for found in nearest[:_SHOWN_KEYS]
        if key.differences(found)
    ]
    if not nearest and not problems:
        lines.append(f"no entry of {key.kernel} exists")
    return lines


def with_reasons(message: str, problems: Collection[CacheError]) -> str:
    """A message about a kernel. The reasons why no entry could be used are added unless the message
    has them."""
    return "\n".join([message, *(line for line in _not_usable(problems) if line not in message)])


def _not_usable(problems: Collection[CacheError]) -> list[str]:
    lines = [f"not usable: {problem}" for problem in problems][:_SHOWN_PROBLEMS]
    more = len(problems) - len(lines)
    return [*lines, f"not usable: {more} more, which the log names"] if more else lines


def _describe_key(key: KeyDescription) -> str:
    """A line with the digest of a miss, or of the build that would satisfy the miss."""
    if not key.is_open:
        return f"key {key.digest}"
    dsl = key.dsl or toolchain.runtime_version()
    built = dataclasses.replace(key, dsl=dsl)
    if built.is_open:
        return "any key will do that agrees in all fields but dsl, cuda and packages"
    return f"key {built.digest} (built with nvidia-cutlass-dsl {dsl}; another version will do)"
