"""Getting a kernel: where it is looked up, what is counted and logged, what must not fail it."""

from __future__ import annotations

import dataclasses
import enum
import errno
import logging
import os
import re
import shutil
import sys
import threading
import timeit
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cache_processes import Process
from conftest import ARCH, forget_everything
from toy_specs import BROKEN, REVERSE, SCALE, SUM, ScaleSpec, SumSpec

from cute_attn import cache
from cute_attn.cache import arch, compiler, jit, linker, settings
from cute_attn.cache import store as store_module
from cute_attn.cache.fingerprint import Fingerprint
from cute_attn.cache.store import Store


def is_the_kernel(function: Callable[..., Any]) -> bool:
    """Call the kernel with tensors that it must refuse: its host code runs without a GPU."""
    with pytest.raises((ValueError, TypeError), match="device"):
        function(torch.zeros(3), torch.zeros(3))
    return True


def test_a_kernel_is_compiled_once_stored_and_loaded(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="cute_attn")
    first = cache.get(SCALE, ScaleSpec(), ARCH)
    assert is_the_kernel(first)
    assert cache.get(SCALE, ScaleSpec(), ARCH) is first
    assert cache.stats().compiles == 1
    assert cache.stats().compile_seconds > 0
    assert cache.stats().memory_only == 0
    key = cache.describe(SCALE, ScaleSpec(), ARCH)
    assert Store(root).digests() == [key.digest]
    assert re.search(
        r"compiled scale ScaleSpec\(factor=2\.0\) for sm_90a in \d+\.\d\d s \(\d+ registers, "
        rf"0 bytes spilled\), key {key.digest[:12]}",
        caplog.text,
    )

    caplog.clear()
    forget_everything()
    assert is_the_kernel(cache.get(SCALE, ScaleSpec(), ARCH))
    assert cache.stats() == cache.Stats(disk_hits=1)
    assert f"hit: scale for {ARCH} from {root}" in caplog.text


def test_prebuilt_directories_come_first_in_their_order(
    root: Path, compiled_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(compiled_root, tmp_path / "image")
    monkeypatch.setenv("CUTE_ATTN_PREBUILT", f"{tmp_path / 'none'}:{tmp_path / 'image'}:{root}")
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert cache.stats() == cache.Stats(prebuilt_hits=1)
    assert not root.exists()
    assert not list((tmp_path / "image").rglob("uses"))


def test_threads_asking_for_one_kernel_compile_it_once(root: Path) -> None:
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.get(SCALE, ScaleSpec(), ARCH)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert cache.stats().compiles == 1


def test_a_look_up_while_another_thread_imports_the_compiler(
    filled_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, compiler.__name__, ModuleType(compiler.__name__))
    assert is_the_kernel(cache.get(SCALE, ScaleSpec(), ARCH))
    assert cache.stats().compiles == 0


def test_a_warm_look_up_takes_at_most_a_microsecond(filled_root: Path) -> None:
    @cache.spec
    class Cached:
        factor: float = 2.0

    spec = Cached()
    cache.get(SCALE, spec, ARCH)
    seconds = min(timeit.repeat(lambda: cache.get(SCALE, spec, ARCH), number=10_000, repeat=20))
    assert seconds / 10_000 < 1e-6


def test_a_kernel_that_does_not_compile_is_a_compile_error_each_time(root: Path) -> None:
    for _ in range(2):
        with pytest.raises(cache.CompileError, match=r"broken ScaleSpec.*no_such_field"):
            cache.get(BROKEN, ScaleSpec(), ARCH)
    assert cache.stats().failures == 2
    assert Store(root).digests() == []
    assert list((root / "v1" / "staging").iterdir()) == []


@pytest.mark.parametrize("wrong", ["hopper", "sm90", "90a", "", "SM_90"])
def test_an_arch_that_makes_no_sense_is_a_value_error(root: Path, wrong: str) -> None:
    with pytest.raises(ValueError, match="sm_90a"):
        cache.get(SCALE, ScaleSpec(), wrong)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("sm_90", "sm_90a"),
        ("sm_90f", "sm_90a"),
        ("sm_100", "sm_100a"),
        ("sm_100f", "sm_100a"),
        ("sm_120", "sm_120a"),
        ("sm_80a", "sm_80"),
        ("9.0", "sm_90a"),
        ("SM_103A", "sm_103a"),
    ],
)
def test_an_arch_that_no_call_looks_for_is_refused_with_the_one_that_may_be_meant(
    root: Path, wrong: str, meant: str
) -> None:
    for function in (cache.get, cache.compile):
        with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
            function(SCALE, ScaleSpec(), wrong)


def test_an_arch_that_the_compiler_does_not_know_is_named_with_those_it_does(root: Path) -> None:
    with pytest.raises(cache.CompileError) as error:
        cache.compile(SCALE, ScaleSpec(), "sm_999a")
    assert re.search(r"does not know sm_999a, only sm_80, .*sm_90a, sm_100a", str(error.value))
    assert "sm_90," not in str(error.value)


# -- compile()


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a", "sm_110a", "sm_120a"])
def test_compile_builds_for_any_arch_without_a_gpu(root: Path, target: str) -> None:
    entry = cache.compile(SCALE, ScaleSpec(), target)
    # The toolkits before CUDA 13 call sm_110a sm_101a.
    names = ["sm_110a", "sm_101a"] if target == "sm_110a" else [target]
    assert any(f".target {name}".encode() in entry.read("kernel.ptx") for name in names)
    (use,) = entry.kernels
    assert use.registers > 0
    assert use.stack == 0
    assert use.spills in ([0, None] if target == "sm_110a" else [0])  # which has no remarks
    again = cache.compile(SCALE, ScaleSpec(), target)
    assert again.directory == entry.directory
    assert cache.stats().compiles == 1


@pytest.mark.filterwarnings("ignore:This static loop has")
@pytest.mark.parametrize("options", ["", "--generate-line-info"])
def test_lines_of_source_are_looked_up_only_for_line_info(
    root: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """A third of the time of a compilation would go there."""
    from cutlass._mlir_helpers import op

    looked_up = []
    look_up = op._get_caller_frame_info
    monkeypatch.setattr(op, "_get_caller_frame_info", lambda: (looked_up.append(1), look_up())[1])
    kernel = dataclasses.replace(SCALE, options=options)
    entry = cache.compile(kernel, ScaleSpec(), ARCH)
    assert bool(looked_up) == bool(options)
    assert (b".loc" in entry.read("kernel.ptx")) == bool(options)


def test_line_info_by_the_environment_is_that_by_the_option(run: Callable[..., Process]) -> None:
    program = f"""
import dataclasses, re
for options in ("", "--generate-line-info"):
    entry = cache.compile(dataclasses.replace(SCALE, options=options), ScaleSpec(), "{ARCH}")
    tell(lines=re.findall(r"[.]loc.*", entry.read("kernel.ptx").decode()))
"""
    process = run(program, CUTE_DSL_LINEINFO="1")
    by_environment, by_option = (process.hear()["lines"] for _ in range(2))
    assert by_environment == by_option != []


def test_spills_are_those_that_ptxas_reports(root: Path) -> None:
    (few,) = cache.compile(SUM, SumSpec(terms=4), ARCH).kernels
    assert few.spills == few.stack == 0
    (many,) = cache.compile(SUM, SumSpec(terms=72), ARCH).kernels
    assert many.registers == 64
    assert many.spill_stores is not None
    assert many.spill_stores > 0
    assert many.spill_loads is not None
    assert many.spill_loads > 0
    assert many.stack > 0


def test_shared_memory_is_that_of_the_code_and_of_the_launch(root: Path) -> None:
    reverse, tail = cache.compile(REVERSE, ScaleSpec(), "sm_80").kernels
    assert "kernel" in reverse.name
    assert "tail" in tail.name
    assert (reverse.static_shared, reverse.dynamic_shared) == (0, 512)  # 128 floats
    assert (tail.static_shared, tail.dynamic_shared) == (0, 4096)  # asked for at the launch


def test_host_code_runs_on_any_cpu_of_its_kind(root: Path) -> None:
    """The compiler would use what this machine's CPU has, such as AVX, unless told not to."""
    objdump = shutil.which("objdump")
    if objdump is None or os.uname().machine != "x86_64":
        pytest.skip("needs objdump, on x86-64")
    entry = cache.compile(SCALE, ScaleSpec(), ARCH)
    assert entry.directory is not None
    listing = os.popen(f"{objdump} -d --no-show-raw-insn {entry.directory}/kernel.so").read()
    assert len(re.findall(r"\bmov\w*\s", listing)) > 100
    assert not re.findall(r"%[yz]mm\d+", listing)
    assert not re.findall(r"^\s+\w+:\s+v\w+", listing, re.MULTILINE)


def test_compiling_leaves_nothing_in_the_working_directory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert list((tmp_path / "work").iterdir()) == []
    assert list((root / "v1" / "staging").iterdir()) == []


def test_a_kernel_edited_while_it_is_compiled_is_not_stored(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = compiler._export

    def edit_meanwhile(*args: Any) -> Any:
        edited = Fingerprint((("toy_kernels", "0" * 64),), ())
        monkeypatch.setattr(jit.fingerprint, "read_fingerprint", lambda *_: edited)
        return original(*args)

    monkeypatch.setattr(compiler, "_export", edit_meanwhile)
    assert is_the_kernel(cache.get(SCALE, ScaleSpec(), ARCH))
    assert cache.stats().memory_only == 1
    assert Store(root).digests() == []
    assert "sources changed" in caplog.text


class Looks(enum.IntEnum):
    ONE = 1


@dataclass(frozen=True)
class Shape:
    """A specialisation with a field that equality ignores."""

    factor: Any
    note: Any = field(default=None, compare=False)


class Alike:
    """Equal to everything of its kind."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 1


@dataclass(frozen=True, eq=False)
class AlikeSpec(Alike):
    factor: float


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Shape(0.0), Shape(-0.0)),
        (Shape(1), Shape(1.0)),
        (Shape(1), Shape(True)),
        (Shape(Looks.ONE), Shape(1)),
        (Shape((2, (1, 2))), Shape((2, (True, 2)))),
        (Shape(1.0, "a"), Shape(1.0, "b")),
        (AlikeSpec(1.0), AlikeSpec(2.0)),
    ],
    ids=repr,
)
def test_specialisations_that_are_equal_but_differ_are_two_kernels(
    root: Path, monkeypatch: pytest.MonkeyPatch, first: Any, second: Any
) -> None:
    assert first == second
    loaded: list[str] = []

    def load(kernel: Any, spec: Any, key: cache.KeyDescription, use: Any) -> Any:
        loaded.append(key.digest)
        return lambda: None

    monkeypatch.setattr(jit, "obtain", load)
    function, other = cache.get(SCALE, first, ARCH), cache.get(SCALE, second, ARCH)
    assert function is not other
    for _ in range(2):
        assert cache.get(SCALE, first, ARCH) is function
        assert cache.get(SCALE, second, ARCH) is other
        assert cache.get(SCALE, dataclasses.replace(first), ARCH) is function
        assert cache.get(SCALE, dataclasses.replace(second), ARCH) is other
    assert loaded == [cache.describe(SCALE, spec, ARCH).digest for spec in (first, second)]


def test_a_spec_that_cannot_be_hashed_is_refused_by_its_field(root: Path) -> None:
    with pytest.raises(TypeError, match=r"Shape\.factor is a builtins\.list"):
        cache.get(SCALE, Shape([1]), ARCH)


# -- a kernel that asks for another


def test_a_kernel_may_ask_for_another_in_its_constructor(root: Path) -> None:
    outer = cache.KernelDef("outer", "toy_kernels:AsksForAnother")
    assert is_the_kernel(cache.get(outer, ScaleSpec(9.0), ARCH))
    assert cache.stats().compiles == 2
    assert len(Store(root).digests()) == 2


@pytest.mark.parametrize("function", [cache.get, cache.compile])
def test_a_kernel_that_asks_for_itself_is_a_compile_error(root: Path, function: Any) -> None:
    outer = cache.KernelDef("outer", "toy_kernels:AsksForItself")
    with pytest.raises(cache.CompileError, match="needs itself to be compiled: outer -> outer"):
        function(outer, ScaleSpec(), ARCH)


def test_a_kernel_that_asks_for_another_while_it_is_traced_is_a_compile_error(root: Path) -> None:
    outer = cache.KernelDef("outer", "toy_kernels:AsksTooLate")
    with pytest.raises(cache.CompileError, match=r"outer asks for scale .* in its constructor"):
        cache.get(outer, ScaleSpec(), ARCH)


def test_quotes_and_spaces_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / """it's "here" {now}"""
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(root))
    (use,) = cache.compile(SCALE, ScaleSpec(), ARCH).kernels
    assert use.spills == 0  # which the file of remarks says
    assert len(Store(root).digests()) == 1


# -- freeze()


def test_a_frozen_cache_serves_what_it_has(filled_root: Path) -> None:
    cache.freeze()
    assert cache.is_frozen()
    assert is_the_kernel(cache.get(SCALE, ScaleSpec(), ARCH))
    cache.unfreeze()
    assert not cache.is_frozen()


def test_a_miss_of_a_frozen_cache_names_the_key_and_its_nearest(filled_root: Path) -> None:
    cache.freeze()
    key = cache.describe(SCALE, ScaleSpec(3.0), ARCH)
    present = cache.describe(SCALE, ScaleSpec(), ARCH)
    with pytest.raises(cache.FrozenCacheMiss) as miss:
        cache.get(SCALE, ScaleSpec(3.0), ARCH)
    assert str(miss.value).splitlines() == [
        "scale ScaleSpec(factor=3.0) for sm_90a is in no cache, and compiling it is forbidden "
        "since cache.freeze()",
        f"key {key.digest}",
        f"nearest key {present.digest[:12]} differs in spec.factor: 3.0 here, 2.0 there",
    ]
    with pytest.raises(cache.FrozenCacheMiss, match="no entry of sum exists"):
        cache.compile(SUM, SumSpec(), ARCH)
    assert cache.stats().compiles == 0


def test_the_nearest_keys_are_sorted_by_how_much_differs(filled_root: Path) -> None:
    cache.get(SCALE, ScaleSpec(2.0), ARCH)
    cache.freeze()
    with pytest.raises(cache.FrozenCacheMiss) as miss:
        cache.get(SCALE, ScaleSpec(3.0), "sm_100a")
    (line,) = str(miss.value).splitlines()[2:]
    assert "spec.factor: 3.0 here, 2.0 there; arch: sm_100a here, sm_90a there" in line


# -- a kernel runs whatever becomes of the disk


def runs_from_memory_with_one_warning(caplog: pytest.LogCaptureFixture, expected: str) -> None:
    for factor in (5.0, 6.0):
        assert is_the_kernel(cache.get(SCALE, ScaleSpec(factor), ARCH))
    assert cache.stats().memory_only == cache.stats().compiles == 2
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings
    assert expected in warnings[0]


def test_no_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for variable in ("CUTE_ATTN_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no passwd entry either
    assert settings.cache_directory() is None
    runs_from_memory_with_one_warning(caplog, "no home directory")


def test_a_full_disk(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(small_disk))
    (small_disk / "filler").write_bytes(b"x" * 40_000)
    runs_from_memory_with_one_warning(caplog, os.strerror(errno.ENOSPC))
    assert Store(small_disk).digests() == []
    (small_disk / "filler").unlink()
    cache.get(SCALE, ScaleSpec(7.0), ARCH)  # and once there is room again, it is stored
    assert len(Store(small_disk).digests()) == 1


def test_a_disk_that_fills_up_in_the_middle_of_a_file(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = store_module._write_synced

    def half(path: Path, data: bytes, mode: int) -> None:
        original(path, data[: len(data) // 2], mode)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store_module, "_write_synced", half)
    runs_from_memory_with_one_warning(caplog, os.strerror(errno.ENOSPC))
    assert Store(root).digests() == []
    assert list((root / "v1" / "staging").iterdir()) == []


def test_a_read_only_file_system(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(small_disk / "cache"))
    assert os.system(f"mount -o remount,ro {small_disk}") == 0
    runs_from_memory_with_one_warning(caplog, os.strerror(errno.EROFS))


def test_a_directory_without_write_permission(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    parent = Path("/tmp") / f"cute_attn-test-{os.getpid()}"
    parent.mkdir()
    try:
        os.chown(parent, 65534, 65534)
        parent.chmod(0o500)
        monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(parent))
        cache.get(SCALE, ScaleSpec(4.0), ARCH)  # imports, while allowed to, what compiling needs
        forget_everything()
        caplog.clear()
        os.seteuid(65534)
        runs_from_memory_with_one_warning(caplog, os.strerror(errno.EACCES))
    finally:
        os.seteuid(0)
        shutil.rmtree(parent)


def test_a_file_in_place_of_the_directory(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.write_text("not a directory")
    runs_from_memory_with_one_warning(caplog, str(root))


def test_nowhere_to_write_at_all(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_has_room", lambda directory: False)
    runs_from_memory_with_one_warning(caplog, "no directory has room to compile in")
    built = cache.compile(SCALE, ScaleSpec(8.0), ARCH)
    assert built.directory is None
    assert built.has("kernel.o")
    with pytest.raises(cache.CacheError, match=r"without kernel\.ptx"):
        built.read("kernel.ptx")


# -- no linker


def test_without_a_linker_the_object_is_stored_and_loaded_by_the_compilers_loader(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linker.shutil, "which", lambda name: None)
    caplog.set_level(logging.INFO, logger="cute_attn")
    entry = cache.compile(SCALE, ScaleSpec(), ARCH)
    assert set(entry.meta["files"]) == {"kernel.o", "kernel.ptx"}  # type: ignore[union-attr]
    assert is_the_kernel(cache.get(SCALE, ScaleSpec(), ARCH))
    assert "no linker" in caplog.text
    assert "with the compiler's loader" in caplog.text
    assert cache.stats().compiles == cache.stats().disk_hits == 1


def test_a_linker_that_fails_is_as_good_as_none(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linker, "_commands", lambda: [["false"], ["/no/such/linker"]])
    entry = cache.compile(SCALE, ScaleSpec(), ARCH)
    assert not entry.has("kernel.so")
    assert "/no/such/linker" in caplog.text


# -- settings


def test_current_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_ARCH", "sm_100a")
    assert cache.current_arch() == "sm_100a"
    arch.forget()
    monkeypatch.setenv("CUTE_ATTN_ARCH", "blackwell")
    with pytest.raises(ValueError, match="blackwell"):
        cache.current_arch()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_arch_of_capability(capability: tuple[int, int], expected: str) -> None:
    assert arch.arch_of_capability(*capability) == expected


def test_gpus_before_ampere_are_not_supported() -> None:
    with pytest.raises(NotImplementedError, match=r"7\.5"):
        arch.arch_of_capability(7, 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("123", 123), ("500M", 500 * 2**20), ("5 GiB", 5 * 2**30), ("1.5k", 1536), ("2TB", 2**41)],
)
def test_sizes(text: str, expected: int) -> None:
    assert settings.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1", "5 GX", "1e9"])
def test_sizes_that_are_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="500M"):
        settings.parse_bytes(text)
    if text:
        monkeypatch.setenv("CUTE_ATTN_CACHE_MAX_BYTES", text)
        with pytest.raises(cache.CacheError, match="CUTE_ATTN_CACHE_MAX_BYTES"):
            settings.max_bytes()


def test_log_level_from_the_environment(run: Callable[..., Process], filled_root: Path) -> None:
    program = "cache.get(SCALE, ScaleSpec(), 'sm_90a'); tell()"
    where = {"CUTE_ATTN_CACHE_DIR": str(filled_root)}
    assert "INFO: hit: scale" in run(program, CUTE_ATTN_LOG="info", **where).result()["stderr"]
    assert run(program, CUTE_ATTN_LOG=None, **where).result()["stderr"] == ""
    assert "choose from" in run(program, CUTE_ATTN_LOG="loud", **where).result()["stderr"]


def test_importing_the_cache_imports_nothing_heavy(run: Callable[..., Process]) -> None:
    program = "tell(modules=sorted(sys.modules))"
    modules = set(run(program).result()["modules"])
    heavy = {"cutlass", "tvm_ffi", "rich", "platformdirs", "elftools", "numpy"}
    assert not heavy & modules
    assert sys.modules.keys() >= {"cute_attn.cache.jit"}
