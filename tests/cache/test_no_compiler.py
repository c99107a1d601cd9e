"""A server image: prebuilt kernels, the runtime library, and no compiler."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_processes import Process
from conftest import ARCH, publish_copies
from toy_specs import SCALE, ScaleSpec

from cute_attn import cache
from cute_attn.cache import loader, toolchain
from cute_attn.cache.entry import META
from cute_attn.cache.errors import RefusedLibrary
from cute_attn.cache.store import Store

Run = Callable[..., Process]

# Importing the compiler raises, as does anything of MLIR.
FORBID = """
import importlib.abc
class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "mlir", "iket", "nvidia_cutlass_dsl") :
            raise ImportError(f"{name} is forbidden")
sys.meta_path.insert(0, Forbid())
"""

# Neither are the packages there, nor what says that they are installed.
UNINSTALL = (
    FORBID
    + """
from importlib import metadata
installed = metadata.version
def version(name):
    if name.startswith("nvidia-cutlass-dsl"):
        raise metadata.PackageNotFoundError(name)
    return installed(name)
metadata.version = version
import importlib.util
find_spec = importlib.util.find_spec
def find(name, *args):
    return None if name == "nvidia_cutlass_dsl" else find_spec(name, *args)
importlib.util.find_spec = find
"""
)

GET = """
function = cache.get(SCALE, ScaleSpec(), "sm_90a")
try:
    function(1, 2)
except Exception as error:
    refusal = str(error)
compiler = [name for name in sys.modules if name.split(".")[0] in ("cutlass", "mlir")]
tell(compiler=compiler, refusal=refusal, **cache.stats()._asdict())
"""


@pytest.fixture
def runtime_library() -> str:
    return str(toolchain.runtime_library().path)


@pytest.fixture
def prebuilt(compiled_root: Path, tmp_path: Path) -> Path:
    shutil.copytree(compiled_root, tmp_path / "prebuilt")
    return tmp_path / "prebuilt"


def rebuild_with(root: Path, **changes: Any) -> None:
    """Publish the entry in ``root`` again under a changed key, in place of the original."""
    import dataclasses

    from cute_attn.cache.entry import Built

    store = Store(root)
    (digest,) = store.digests()
    entry = store.open(digest)
    assert entry is not None
    files = {name: entry.read(name) for name in entry.meta["files"]}
    key = dataclasses.replace(entry.key, **changes)
    entry.close()
    store.remove(digest)
    store.publish(Built(key, files, entry.kernels, 1.0))


def test_a_hit_imports_nothing_of_the_compiler(run: Run, filled_root: Path) -> None:
    result = run(
        "\nfrom importlib import metadata, util\n"
        + FORBID.replace(', "nvidia_cutlass_dsl"', "")
        + GET
    ).result()
    assert result["disk_hits"] == 1
    assert result["compiler"] == []
    assert "Mismatched type on argument #0" in result["refusal"]  # the kernel's own host code


@pytest.mark.parametrize("where", ["user", "prebuilt"])
def test_without_an_installed_compiler_an_entry_matches_by_all_that_is_known(
    run: Run, compiled_root: Path, root: Path, prebuilt: Path, where: str, runtime_library: str
) -> None:
    if where == "user":
        shutil.copytree(compiled_root, root)
    result = run(
        UNINSTALL + GET,
        CUTE_ATTN_RUNTIME_LIBRARY=runtime_library,
        CUTE_ATTN_PREBUILT=str(prebuilt) if where == "prebuilt" else None,
    ).result()
    assert (result["disk_hits"], result["prebuilt_hits"]) == ((1, 0) if where == "user" else (0, 1))
    assert result["compiles"] == 0
    assert result["compiler"] == []
    assert "Mismatched type on argument #0" in result["refusal"]


def test_without_a_compiler_the_version_that_an_entry_was_built_with_does_not_matter(
    run: Run, prebuilt: Path, runtime_library: str
) -> None:
    rebuild_with(prebuilt, dsl="4.99.0")
    environment = {
        "CUTE_ATTN_RUNTIME_LIBRARY": runtime_library,
        "CUTE_ATTN_PREBUILT": str(prebuilt),
    }
    assert run(UNINSTALL + GET, **environment).result()["prebuilt_hits"] == 1
    frozen = "cache.freeze()\n"
    assert run(UNINSTALL + frozen + GET, **environment).result()["prebuilt_hits"] == 1


def test_without_a_compiler_an_entry_is_opened_once_to_learn_its_key(
    run: Run, prebuilt: Path, runtime_library: str
) -> None:
    publish_copies(prebuilt, [3.0, 4.0, 5.0, 6.0])
    program = """
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
counts = []
for factor in (2.0, 3.0, 4.0):
    opened.clear()
    cache.get(SCALE, ScaleSpec(factor), "sm_90a")
    counts.append(sum(os.path.basename(path) == "meta.json" for path in opened))
tell(counts=counts, **cache.stats()._asdict())
"""
    result = run(
        UNINSTALL + program,
        CUTE_ATTN_RUNTIME_LIBRARY=runtime_library,
        CUTE_ATTN_PREBUILT=str(prebuilt),
    ).result()
    assert result["prebuilt_hits"] == 3
    assert result["counts"] == [6, 1, 1]  # all five, then the one that is loaded


def test_without_a_compiler_an_entry_that_appears_later_is_found(
    run: Run, prebuilt: Path, runtime_library: str
) -> None:
    server = run(
        UNINSTALL
        + """
cache.get(SCALE, ScaleSpec(), "sm_90a")
tell()
sys.stdin.readline()
cache.get(SCALE, ScaleSpec(3.0), "sm_90a")
tell(**cache.stats()._asdict())
""",
        CUTE_ATTN_RUNTIME_LIBRARY=runtime_library,
        CUTE_ATTN_PREBUILT=str(prebuilt),
    )
    server.hear()
    publish_copies(prebuilt, [3.0])
    server.tell("go")
    assert server.hear()["prebuilt_hits"] == 2


@pytest.fixture
def for_all_users(compiled_root: Path) -> Iterator[Path]:
    """A directory that others may read, with an entry in `good`, and `bad`, which they may not."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    path = Path("/tmp") / f"cute_attn-test-{os.getpid()}"
    shutil.copytree(compiled_root, path / "good")
    shutil.copytree(compiled_root, path / "bad")
    for directory in (path, *path.rglob("*")):
        directory.chmod(0o755 if directory.is_dir() else 0o644)
    (path / "bad" / "v1").chmod(0o700)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("compiler", ["", UNINSTALL], ids=["compiler", "no_compiler"])
def test_an_unreadable_directory_hides_no_other(
    run: Run, for_all_users: Path, runtime_library: str, compiler: str
) -> None:
    environment = {
        "CUTE_ATTN_RUNTIME_LIBRARY": runtime_library,
        "CUTE_ATTN_PREBUILT": f"{for_all_users / 'bad'}:{for_all_users / 'good'}",
    }
    # First what this user may not be able to read: Python's own modules.
    nobody = """
import tvm_ffi
from cute_attn.cache import loader, toolchain
cache.describe(SCALE, ScaleSpec(), "sm_90a")
toolchain.runtime_version()
loader._open_runtime_library()
os.seteuid(65534)
"""
    result = run(compiler + nobody + GET, **environment).result()
    assert result["prebuilt_hits"] == 1
    assert f"{for_all_users / 'bad'} cannot be read" in result["stderr"]
    program = """
cache.freeze()
try:
    cache.get(SCALE, ScaleSpec(7.0), "sm_90a")
except cache.FrozenCacheMiss as miss:
    tell(miss=str(miss))
"""
    result = run(compiler + nobody + program, **environment).result()
    assert "spec.factor: 7.0 here, 2.0 there" in result["miss"]


def test_a_frozen_miss_names_the_key_that_a_build_would_use(
    run: Run, prebuilt: Path, runtime_library: str
) -> None:
    program = """
cache.freeze()
try:
    cache.get(SCALE, ScaleSpec(), "sm_90a")
except cache.FrozenCacheMiss as miss:
    tell(miss=str(miss).splitlines())
"""
    # The version of the runtime library is known, that of the compiler is not.
    versions = UNINSTALL.replace(
        'if name.startswith("nvidia-cutlass-dsl"):', 'if name == "nvidia-cutlass-dsl":'
    )
    environment = {
        "CUTE_ATTN_RUNTIME_LIBRARY": runtime_library,
        "CUTE_ATTN_PREBUILT": str(prebuilt),
    }
    (path,) = prebuilt.glob("v1/??/*/kernel.so")
    path.write_bytes(b"damaged")
    key = cache.describe(SCALE, ScaleSpec(), ARCH)
    _, named, problem = run(versions + program, **environment).result()["miss"]
    assert named.startswith(f"key {key.digest} (built with nvidia-cutlass-dsl {key.dsl}; ")
    assert problem.startswith(f"not usable: {path} ")
    _, named, problem = run(UNINSTALL + program, **environment).result()["miss"]
    assert named == "any key will do that agrees in all fields but dsl, cuda and packages"
    assert problem.startswith(f"not usable: {path} ")


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "sm_100a"},
        {"options": "--opt-level 1"},
        {"tvm_ffi": "9.9"},
        {"platform": "linux-vax-glibc"},
        {"sources": (("toy_kernels", "0" * 64),)},
        {"packages": (("numpy", "numpy 2.0"),)},
        {"spec": (("factor", "3.0"),)},
        {"cuda": "cu99"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_without_a_compiler_all_else_matters(
    run: Run, prebuilt: Path, runtime_library: str, change: dict[str, Any]
) -> None:
    rebuild_with(prebuilt, **change)
    program = """
try:
    cache.get(SCALE, ScaleSpec(), "sm_90a")
except cache.CompileError as error:
    tell(error=str(error))
"""
    result = run(
        UNINSTALL + program,
        CUTE_ATTN_RUNTIME_LIBRARY=runtime_library,
        CUTE_ATTN_PREBUILT=str(prebuilt),
    ).result()
    assert "nvidia-cutlass-dsl cannot be imported" in result["error"]
    assert "nearest key" in result["error"]
    (field,) = change
    named = {"sources": "source toy_", "packages": "package numpy", "spec": "spec.factor"}
    assert f"differs in {named.get(field, field)}" in result["error"]


# -- the reasons why an entry cannot be used


def flip_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


GET_OR_TELL = """
try:
    cache.{function}
except cache.CacheError as error:
    tell(error=str(error), **cache.stats()._asdict())
else:
    tell(error="", **cache.stats()._asdict())
"""
WAYS = {
    "get": "get(SCALE, ScaleSpec(), 'sm_90a')",
    "compile": "compile(SCALE, ScaleSpec(), 'sm_90a')",
    "warmup": "warmup([(SCALE, ScaleSpec()), (SCALE, ScaleSpec(7.0))], arch='sm_90a', jobs=1)",
}


def let_others_write(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize(
    ("where", "spoil", "name", "way"),
    [
        ("user", flip_middle, "kernel.so", "get"),
        ("user", flip_middle, META, "get"),
        ("user", let_others_write, "kernel.so", "get"),
        ("user", flip_middle, META, "compile"),
        ("user", flip_middle, "kernel.so", "warmup"),
        ("prebuilt", flip_middle, "kernel.so", "get"),
        ("prebuilt", let_others_write, "kernel.so", "compile"),
        ("prebuilt", flip_middle, META, "warmup"),
    ],
)
def test_without_a_compiler_damage_is_in_the_error_and_in_the_log(
    run: Run,
    compiled_root: Path,
    root: Path,
    prebuilt: Path,
    runtime_library: str,
    where: str,
    spoil: Callable[[Path], None],
    name: str,
    way: str,
) -> None:
    if where == "user":
        shutil.copytree(compiled_root, root)
    directory = root if where == "user" else prebuilt
    (path,) = directory.glob(f"v1/??/*/{name}")
    spoil(path)
    result = run(
        UNINSTALL + GET_OR_TELL.format(function=WAYS[way]),
        CUTE_ATTN_RUNTIME_LIBRARY=runtime_library,
        CUTE_ATTN_PREBUILT=str(prebuilt) if where == "prebuilt" else None,
    ).result()
    assert "nvidia-cutlass-dsl cannot be imported" in result["error"]
    assert f"not usable: {path} " in result["error"]
    assert str(path) in result["stderr"]
    quarantined = [item.name[:64] for item in root.glob("v1/quarantine/*")]
    if where == "user":
        assert quarantined == [path.parent.name]
        assert not path.exists()
        assert result["quarantined"] == 1
        assert "moved to" in result["stderr"]
    else:
        assert quarantined == []
        assert path.exists()


def test_without_a_compiler_another_entry_serves_in_place_of_a_damaged_one(
    run: Run, filled_root: Path, runtime_library: str
) -> None:
    """The best of two is damaged: that of the library's own version."""
    (damaged,) = filled_root.glob("v1/??/*/kernel.so")
    copy = filled_root.with_name("copy")
    shutil.copytree(filled_root, copy)
    rebuild_with(copy, dsl="0.0.1")
    shutil.copytree(copy, filled_root, dirs_exist_ok=True)
    flip_middle(damaged)
    versions = UNINSTALL.replace(
        'if name.startswith("nvidia-cutlass-dsl"):', 'if name == "nvidia-cutlass-dsl":'
    )
    environment = {"CUTE_ATTN_RUNTIME_LIBRARY": runtime_library}
    result = run(versions + GET, **environment).result()
    assert (result["disk_hits"], result["quarantined"]) == (1, 1)
    assert str(damaged) in result["stderr"]
    assert not damaged.exists()
    result = run(versions + GET, **environment).result()
    assert (result["disk_hits"], result["quarantined"], result["stderr"]) == (1, 0, "")


def test_an_entry_under_a_lock_of_another_process_is_not_put_aside(
    run: Run, filled_root: Path, runtime_library: str
) -> None:
    """That process has the compiler, and may be about to replace it."""
    (library,) = filled_root.glob("v1/??/*/kernel.so")
    flip_middle(library)
    with Store(filled_root).locked(library.parent.name) as held:
        assert held
        result = run(
            UNINSTALL + GET_OR_TELL.format(function=WAYS["get"]),
            CUTE_ATTN_RUNTIME_LIBRARY=runtime_library,
        ).result()
    assert f"not usable: {library} " in result["error"]
    assert str(library) in result["stderr"]
    assert library.exists()


def test_without_a_compiler_an_unsafe_root_is_in_the_error_and_in_the_log(
    run: Run, filled_root: Path, runtime_library: str
) -> None:
    filled_root.chmod(0o777)
    result = run(
        UNINSTALL + GET_OR_TELL.format(function=WAYS["get"]),
        CUTE_ATTN_RUNTIME_LIBRARY=runtime_library,
    ).result()
    for text in (result["error"], result["stderr"]):
        assert f"{filled_root} can be written by others (owner uid" in text


def test_without_pyelftools_nothing_is_compiled(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_args(_: object) -> None:
        pytest.fail("it begins to compile")

    monkeypatch.setattr(importlib.import_module("toy_kernels").Scale, "fake_args", fake_args)
    for name in [name for name in sys.modules if name.split(".")[0] == "elftools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "elftools", None)
    with pytest.raises(cache.CompileError, match=r"pyelftools cannot be imported.*install it"):
        cache.compile(SCALE, ScaleSpec(), ARCH)


def test_an_entry_that_the_runtime_library_cannot_serve_is_not_used(
    run: Run, prebuilt: Path, tmp_path: Path
) -> None:
    """A library without the symbols: loading fails at once, and not at the first launch."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / str(toolchain.cuda_flavour()) / "libcute_dsl_runtime.so"
    library.parent.mkdir()
    assert os.system(f"echo 'int nothing;' | cc -shared -x c - -o {library}") == 0
    program = """
try:
    cache.get(SCALE, ScaleSpec(), "sm_90a")
except cache.CompileError as error:
    tell(error=str(error))
"""
    result = run(
        UNINSTALL + program,
        CUTE_ATTN_RUNTIME_LIBRARY=str(library),
        CUTE_ATTN_PREBUILT=str(prebuilt),
    ).result()
    for text in (result["stderr"], result["error"]):
        assert f"cannot be loaded with {library}: " in text
        assert "undefined symbol" in text


def test_a_missing_runtime_library_says_what_to_install(run: Run, filled_root: Path) -> None:
    program = """
try:
    cache.get(SCALE, ScaleSpec(), "sm_90a")
except cache.CacheError as error:
    tell(error=str(error))
"""
    result = run(UNINSTALL + program).result()
    assert "pip install --no-deps nvidia-cutlass-dsl-libs-cu12" in result["error"]
    assert "CUTE_ATTN_RUNTIME_LIBRARY" in result["error"]
    result = run(program, CUTE_ATTN_RUNTIME_LIBRARY="/no/such/file.so").result()
    assert "/no/such/file.so: there is no such file" in result["error"]


def test_what_is_known_of_the_toolchain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert toolchain.dsl_version() == toolchain.runtime_version()
    assert toolchain.cuda_flavour() in ("cu12", "cu13")
    assert toolchain.tvm_ffi_abi() == "0.1"
    library = tmp_path / "opt" / "cu13" / "lib" / "runtime.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setenv("CUTE_ATTN_RUNTIME_LIBRARY", str(library))
    toolchain.forget()
    assert toolchain.runtime_library() == toolchain.RuntimeLibrary(library, "cu13")


@pytest.mark.parametrize(
    ("installed", "driver", "expected"),
    [
        ((12,), None, "cu12"),
        ((12,), 13, "cu12"),
        ((12, 13), None, "cu13"),
        ((12, 13), 12, "cu12"),
        ((12, 13), 13, "cu13"),
        ((12, 13), 14, "cu13"),
    ],
)
def test_of_two_cuda_flavours_the_one_that_the_compiler_takes(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[int, ...], driver: int | None, expected: str
) -> None:
    flavours = {major: Path(f"/cu{major}/lib/libcute_dsl_runtime.so") for major in installed}
    monkeypatch.setattr(toolchain, "_installed_flavours", lambda: flavours)
    monkeypatch.setattr(toolchain, "_driver_cuda_major", lambda: driver)
    toolchain.forget()
    assert toolchain.cuda_flavour() == expected
    assert toolchain.runtime_library().path == flavours[int(expected[2:])]


def test_of_two_installed_libraries_the_one_that_python_finds_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a virtual environment on top of another, with a compiler of its own."""
    libraries = [
        tmp_path / where / "nvidia_cutlass_dsl/cu12/lib/libcute_dsl_runtime.so"
        for where in ("above", "below")
    ]
    for library in libraries:
        library.parent.mkdir(parents=True)
        library.touch()
    monkeypatch.delitem(sys.modules, "nvidia_cutlass_dsl", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "above"), str(tmp_path / "below")])
    assert toolchain._installed_flavours() == {12: libraries[0]}


def test_a_prebuilt_entry_says_what_it_was_built_with(prebuilt: Path) -> None:
    (meta_path,) = prebuilt.glob(f"v1/??/*/{META}")
    meta = json.loads(meta_path.read_text())
    key = cache.describe(SCALE, ScaleSpec(), ARCH)
    assert meta["key"] == key.to_json()
    assert meta["digest"] == key.digest
    assert set(meta["files"]) == {"kernel.o", "kernel.so", "kernel.ptx"}
    assert meta["compile_seconds"] > 0
    (kernel,) = meta["kernels"]
    assert set(kernel) == {
        "name",
        "registers",
        "spill_stores",
        "spill_loads",
        "stack",
        "static_shared",
        "dynamic_shared",
    }
    entry = Store(prebuilt).open(key.digest)
    assert entry is not None
    assert entry.kernels[0].name == kernel["name"]
    entry.close()


# -- a runtime library of others


def chown_to_nobody(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("spoil", [chown_to_nobody, lambda path: path.chmod(0o777)])
@pytest.mark.parametrize("what", ["", ".."])
def test_a_runtime_library_that_others_may_write_is_refused_if_named(
    filled_root: Path,
    tmp_path: Path,
    runtime_library: str,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
    what: str,
) -> None:
    library = tmp_path / "cu12" / "libcute_dsl_runtime.so"
    library.parent.mkdir(mode=0o700)
    library.symlink_to(runtime_library)  # a link is followed: what counts is where it leads
    monkeypatch.setenv("CUTE_ATTN_RUNTIME_LIBRARY", str(library))
    toolchain.forget()
    assert toolchain.runtime_library().path == library
    toolchain.forget()
    library.unlink()
    shutil.copy(runtime_library, library)
    library.chmod(0o755)
    refused = library.parent if what else library
    spoil(refused)
    status = refused.stat()
    fact = f"{refused} .*owner uid {status.st_uid}, mode {status.st_mode & 0o7777:04o}"
    with pytest.raises(RefusedLibrary, match=f"{fact}.*chmod go-w, or name another copy"):
        toolchain.runtime_library()


@pytest.mark.parametrize("way", ["get", "warmup"])
@pytest.mark.parametrize("uninstall", ["", UNINSTALL])
def test_a_refused_runtime_library_is_one_error_and_touches_no_entry(
    run: Run,
    filled_root: Path,
    entry_path: Path,
    tmp_path: Path,
    runtime_library: str,
    uninstall: str,
    way: str,
) -> None:
    library = tmp_path / "cu12" / "libcute_dsl_runtime.so"
    library.parent.mkdir(mode=0o700)
    shutil.copy(runtime_library, library)
    library.chmod(0o666)
    result = run(
        uninstall + GET_OR_TELL.format(function=WAYS[way]), CUTE_ATTN_RUNTIME_LIBRARY=str(library)
    ).result()
    assert result["error"].count(str(library)) == 2  # the variable, and what is wrong with it
    assert (
        f"{library} can be written by others (owner uid {os.geteuid()}, mode 0666)"
        in (result["error"])
    )
    assert "chmod go-w" in result["error"]
    assert "\n" not in result["error"]
    assert result["stderr"] == ""
    assert (result["compiles"], result["quarantined"]) == (0, 0)
    assert entry_path.exists()
    assert not (filled_root / "v1" / "quarantine").exists()


@pytest.mark.parametrize("share", [0.5, 1 - 1e-7])
def test_a_truncated_runtime_library_is_an_error_and_no_bus_error(
    run: Run,
    filled_root: Path,
    entry_path: Path,
    tmp_path: Path,
    runtime_library: str,
    share: float,
) -> None:
    library = tmp_path / "cu12" / "libcute_dsl_runtime.so"
    library.parent.mkdir(mode=0o700)
    shutil.copy(runtime_library, library)
    whole = library.stat().st_size
    os.truncate(library, int(share * whole))
    result = run(
        GET_OR_TELL.format(function=WAYS["get"]), CUTE_ATTN_RUNTIME_LIBRARY=str(library)
    ).result()
    kept = int(share * whole)
    assert f"{library} is truncated: it has {kept} bytes of {whole}" in result["error"]
    assert result["compiles"] == 0
    assert entry_path.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(100), b"text" * 99]
)
def test_what_is_no_library_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    library = tmp_path / "libcute_dsl_runtime.so"
    library.write_bytes(content)
    monkeypatch.setenv("CUTE_ATTN_RUNTIME_LIBRARY", str(library))
    toolchain.forget()
    loader._open_runtime_library.cache_clear()
    with pytest.raises(cache.CacheError, match=f"runtime library {library} cannot be loaded: "):
        loader.load_libraries()


def test_an_installed_runtime_library_that_others_may_write_is_loaded_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = tmp_path / "libcute_dsl_runtime.so"
    library.touch(0o700)
    monkeypatch.setattr(toolchain, "_installed_flavours", lambda: {12: library})
    for mode, warnings in ((0o755, 0), (0o777, 1), (0o777, 1)):
        library.chmod(mode)
        toolchain.forget()
        assert toolchain.runtime_library().path == library
        assert len(caplog.messages) == warnings
    assert f"{library} can be written by others" in caplog.text


def test_who_owns_the_python_that_runs_may_own_the_runtime_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = tmp_path / "environment"
    prefix.mkdir()
    library = prefix / "libcute_dsl_runtime.so"
    library.touch(0o755)
    for path in (prefix, library):
        chown_to_nobody(path)
    monkeypatch.setattr(toolchain, "_installed_flavours", lambda: {12: library})
    monkeypatch.setattr(sys, "prefix", str(prefix))
    assert toolchain.runtime_library().path == library
    assert not caplog.messages
