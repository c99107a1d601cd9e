"""``python -m cute_attn.cache``."""

from __future__ import annotations

import cProfile
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cache_processes import Process
from conftest import ARCH, fill
from toy_specs import SCALE, SUM, ScaleSpec

import cute_attn
from cute_attn import cache
from cute_attn.cache import __main__ as command_line
from cute_attn.cache.__main__ import main
from cute_attn.cache.recording import add
from cute_attn.cache.store import Store


@dataclass(frozen=True)
class WideSpec:
    """A specialisation whose description is wider than a terminal."""

    terms: int = 4
    names: tuple[str, ...] = ("something",) * 30


Capture = pytest.CaptureFixture[str]

SPEC = """
[[operator]]
plan = "toy_specs:plan_scale"
factors = [2.0, 3.0, 2.0]
"""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    return path


def test_help_without_a_command(capsys: Capture) -> None:
    assert main([]) == 0
    assert "prune" in capsys.readouterr().out


def test_path(root: Path, capsys: Capture) -> None:
    assert main(["path"]) == 0
    assert capsys.readouterr().out == f"{root}\n"


def test_path_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(cache.jit.settings, "cache_directory", lambda: None)
    assert main(["path"]) == 1
    assert "no home directory" in capsys.readouterr().err


def test_ls(filled_root: Path, entry_path: Path, capsys: Capture) -> None:
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert main(["ls"]) == 0
    shown = capsys.readouterr().out
    for text in (entry_path.name[:12], "scale", "ScaleSpec(factor=2.0)", ARCH, "KiB", "1 entries"):
        assert text in shown
    assert main(["ls", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["key"] == entry_path.name
    assert row["path"] == str(entry_path)
    assert row["hits"] == 1
    assert row["bytes"] > 1000


def test_ls_of_nothing(root: Path, capsys: Capture) -> None:
    assert main(["ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_info(filled_root: Path, entry_path: Path, capsys: Capture) -> None:
    assert main(["info", entry_path.name[:8]]) == 0
    shown = capsys.readouterr().out
    key = cache.describe(SCALE, ScaleSpec(), ARCH)
    assert key.text in shown
    assert str(entry_path) in shown
    assert "0 bytes spilled" in shown
    assert main(["info", entry_path.name, "--json"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert everything["key"] == key.to_json()
    assert everything["kernels"][0]["spill_stores"] == 0


@pytest.mark.parametrize("prefix", ["", "zz"])
def test_info_of_no_or_many_keys(filled_root: Path, prefix: str, capsys: Capture) -> None:
    cache.compile(SCALE, ScaleSpec(3.0), ARCH)
    assert main(["info", prefix]) == 1
    assert "entries have a key that begins with" in capsys.readouterr().err


def test_verify(filled_root: Path, entry_path: Path, capsys: Capture) -> None:
    assert main(["verify"]) == 0
    assert "1 entries intact, 0 damaged" in capsys.readouterr().out
    with (entry_path / "kernel.ptx").open("ab") as file:
        file.write(b"!")
    assert main(["verify"]) == 1
    assert str(entry_path / "kernel.ptx") in capsys.readouterr().out
    assert main(["verify", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["key"] == entry_path.name
    assert "kernel.ptx" in row["problem"]


def test_prune(filled_root: Path, entry_path: Path, capsys: Capture) -> None:
    assert main(["prune"]) == 0
    assert "removed 0 entries" in capsys.readouterr().out
    assert entry_path.exists()
    assert main(["prune", "--max-bytes", "1K"]) == 0
    assert "removed 1 entries" in capsys.readouterr().out
    assert not entry_path.exists()
    with pytest.raises(SystemExit) as wrong:
        main(["prune", "--max-bytes", "lots"])
    assert wrong.value.code == 2


def test_clear(filled_root: Path, entry_path: Path, capsys: Capture) -> None:
    assert main(["clear"]) == 0
    assert not entry_path.exists()
    assert "removed 1 entries" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["prune", "--max-bytes", "1K"], ["clear"]])
def test_removal_as_json(entry_path: Path, capsys: Capture, command: list[str]) -> None:
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["entries"] == 1
    assert told["bytes"] >= 8192
    assert (told["in_use"], told["remaining"], told["problems"]) == (0, 0, [])
    assert told.get("leftovers") == (0 if command[0] == "prune" else None)


def test_removal_says_what_is_in_use(entry_path: Path, capsys: Capture) -> None:
    cache.get(SCALE, ScaleSpec(), ARCH)
    assert main(["clear"]) == 0
    assert "1 are in use, and stay" in capsys.readouterr().out
    assert entry_path.exists()


def test_prune_does_nothing_under_a_limit_that_is_none(
    entry_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("CUTE_ATTN_CACHE_MAX_BYTES", "lots")
    assert main(["prune"]) == 1
    assert "error: CUTE_ATTN_CACHE_MAX_BYTES: 'lots' is not a size" in capsys.readouterr().err
    assert main(["prune", "--max-bytes", "1G"]) == 0
    with pytest.raises(SystemExit) as wrong:
        main(["prune", "--max-bytes", "9" * 400])
    assert wrong.value.code == 2


@pytest.mark.parametrize("command", ["ls", "verify", "clear", "prune"])
@pytest.mark.parametrize("what", ["", "v1", "v1/??"])
def test_a_directory_that_cannot_be_read_is_an_error(
    run: Callable[..., Process], filled_root: Path, entry_path: Path, command: str, what: str
) -> None:
    """A user who does not own the directory cannot change its mode either."""
    (path,) = filled_root.glob(what) if what else (filled_root,)
    path.chmod(0)
    program = """
import ctypes
ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
def refuse(*args, **kwargs):
    raise PermissionError(1, "Operation not permitted")
os.chmod = refuse
from cute_attn.cache.__main__ import main
"""
    result = run(f"{program}tell(status=main([{command!r}]))").result()
    path.chmod(0o700)
    assert result["status"] == 1
    assert "Traceback" not in result["stderr"]
    assert entry_path.exists()


@pytest.mark.parametrize("command", ["ls", "verify", "info", "path"])
def test_the_reader_may_stop_reading(entry_path: Path, root: Path, command: str) -> None:
    key = [entry_path.name] if command == "info" else []
    fill(root, 300)
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "cute_attn.cache", command, *key],
            env=dict(os.environ),
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_ls_fits_the_line(
    root: Path, instant_compiler: None, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    cache.compile(SUM, WideSpec(), ARCH)
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 100
    assert lines[1].endswith("...")
    assert main(["ls", "--wide"]) == 0
    assert cache.describe(SUM, WideSpec(), ARCH).specialisation in capsys.readouterr().out


def test_ls_of_thousands_takes_few_calls_for_each(
    root: Path, instant_compiler: None, capsys: Capture
) -> None:
    """A table that measures each cell takes thousands."""
    row = {"kernel": "k", "specialisation": "s" * 400, "arch": ARCH, "bytes": 1, "hits": 1}
    rows = [{**row, "key": f"{i:064}", "last_use": 0.0} for i in range(5000)]
    profile = cProfile.Profile()
    profile.runcall(command_line._print_entries, rows, 100)
    assert sum(entry.callcount for entry in profile.getstats()) < 100 * len(rows)
    assert len(capsys.readouterr().out.splitlines()) == 5002


@pytest.mark.usefixtures("without_torch")
def test_build_makes_a_directory_that_a_server_can_use(
    root: Path,
    spec_file: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "image"
    assert main(["build", str(spec_file), "--arch", "sm_90a,sm_100a", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 kernels" in shown
    for text in ("ScaleSpec(factor=3.0)", "sm_90a", "sm_100a", "registers", "spilled bytes", " s "):
        assert text in shown
    assert not root.exists()
    assert {path.name for path in (out / "v1").iterdir()} == {d[:2] for d in Store(out).digests()}
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in out.rglob("*"))
    monkeypatch.setenv("CUTE_ATTN_PREBUILT", str(out))
    cache.clear_memory()
    cache.reset_stats()
    cache.freeze()
    for arch in ("sm_90a", "sm_100a"):
        cache.get(SCALE, ScaleSpec(3.0), arch)
    assert cache.stats() == cache.Stats(prebuilt_hits=2)


def test_build_says_what_failed_and_builds_the_rest(
    root: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(SPEC + '[[operator]]\nplan = "toy_specs:plan_broken"\n')
    out = tmp_path / "image"
    assert main(["build", str(path), "--arch", ARCH, "--out", str(out), "-j", "1"]) == 1
    captured = capsys.readouterr()
    assert "2 of 3 kernels" in captured.out
    assert "broken ScaleSpec(factor=2.0)" in captured.err
    assert len(Store(out).digests()) == 2


def test_build_goes_on_where_an_architecture_has_no_kernel(
    root: Path, tmp_path: Path, capsys: Capture
) -> None:
    path, out = tmp_path / "spec.toml", tmp_path / "image"
    path.write_text('[[operator]]\nplan = "toy_specs:plan_hopper"\n')
    build = ["build", str(path), "--arch", "sm_100a,sm_90a", "--out", str(out), "-j", "1"]
    assert main(build) == 1
    captured = capsys.readouterr()
    assert "1 of 1 kernels" in captured.out
    assert captured.err == (
        "error: toy_specs:plan_hopper('sm_100a'): no kernel for sm_100a; there is: sm_90a\n"
    )
    assert len(Store(out).digests()) == 1
    with pytest.raises(cache.CacheError, match="no kernel for sm_100a"):
        cache.plan_file(path, "sm_100a")


@pytest.mark.parametrize("named", ['"sm_90a"', '["sm_90a", "sm_80"]'])
def test_a_table_may_be_for_some_architectures(
    root: Path, tmp_path: Path, capsys: Capture, named: str
) -> None:
    path, out = tmp_path / "spec.toml", tmp_path / "image"
    path.write_text(
        f'[[operator]]\nplan = "toy_specs:plan_hopper"\narch = {named}\n'
        '[[operator]]\nplan = "toy_specs:plan_scale"\nfactors = [3.0]\narch = "sm_100a"\n'
    )
    build = ["build", str(path), "--arch", "sm_100a,sm_90a", "--out", str(out), "-j", "1"]
    assert main(build) == 0
    assert "2 of 2 kernels" in capsys.readouterr().out
    assert cache.plan_file(path, "sm_100a") == [(SCALE, ScaleSpec(3.0))]
    assert cache.plan_file(path, "sm_90a") == [(SCALE, ScaleSpec(2.0))]


@pytest.fixture
def recorded_on_hopper(tmp_path: Path) -> Path:
    path = tmp_path / "used.toml"
    path.write_text('[[operator]]\nplan = "toy_specs:plan_hopper"\narch = "sm_90a"\n')
    add(path, [(SCALE, ScaleSpec(3.0), "sm_90a")])
    return path


ONLY_HOPPER = "has no kernel for {}, only for sm_90a: record or list what it needs"


def test_a_build_of_nothing_is_an_error(
    root: Path, recorded_on_hopper: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A file recorded on another GPU has no kernel to build, and an empty image is no success."""
    path, out = recorded_on_hopper, tmp_path / "image"
    assert main(["build", str(path), "--arch", "sm_100a,sm_80", "--out", str(out)]) == 1
    assert capsys.readouterr().err == "".join(
        f"error: {path} {ONLY_HOPPER.format(arch)}\n" for arch in ("sm_100a", "sm_80")
    )
    assert not out.exists()


def test_a_build_for_an_architecture_that_the_file_does_not_list_is_an_error_after_the_rest(
    root: Path, recorded_on_hopper: Path, tmp_path: Path, capsys: Capture
) -> None:
    path, out = recorded_on_hopper, tmp_path / "image"
    build = ["build", str(path), "--arch", "sm_90a,sm_100a", "--out", str(out), "-j", "1"]
    assert main(build) == 1
    captured = capsys.readouterr()
    assert "2 of 2 kernels" in captured.out
    assert captured.err == f"error: {path} {ONLY_HOPPER.format('sm_100a')}\n"
    assert len(Store(out).digests()) == 2


def test_a_warm_up_for_an_architecture_that_the_file_does_not_list_is_an_error(
    root: Path, recorded_on_hopper: Path
) -> None:
    for warmup in (cache.warmup, cute_attn.warmup):
        with pytest.raises(cache.CacheError, match=ONLY_HOPPER.format("sm_100a")):
            warmup(recorded_on_hopper, arch="sm_100a")
    with pytest.raises(cache.CacheError, match=ONLY_HOPPER.format("sm_100a")):
        cache.plan_file(recorded_on_hopper, "sm_100a")
    report = cache.warmup(str(recorded_on_hopper), arch="sm_90a", jobs=1, progress=False)
    assert (report.kernels, len(report.compiled)) == (2, 2)


def test_plans_without_a_kernel_are_no_success(root: Path, tmp_path: Path, capsys: Capture) -> None:
    path, out = tmp_path / "used.toml", tmp_path / "image"
    path.write_text('[[operator]]\nplan = "toy_specs:plan_scale"\nfactors = []\n')
    assert main(["build", str(path), "--arch", "sm_90a", "--out", str(out)]) == 1
    assert capsys.readouterr().err == f"error: {path} has no kernel for sm_90a\n"
    with pytest.raises(cache.CacheError, match=f"{path} has no kernel for sm_90a"):
        cache.warmup(path, arch="sm_90a")


@pytest.mark.parametrize("wrong", ["0", "-1", "two", "1.5"])
def test_build_takes_no_such_number_of_processes(
    spec_file: Path, tmp_path: Path, capsys: Capture, wrong: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["build", str(spec_file), "--arch", ARCH, "--out", str(tmp_path), f"-j{wrong}"])
    assert end.value.code == 2
    assert f"'{wrong}' is not a number of at least 1" in capsys.readouterr().err


def a_file(path: Path) -> str:
    path.write_text("")
    return "Not a directory"


def for_all(path: Path) -> str:
    path.mkdir()
    path.chmod(0o777)
    return "can be written by others"


def nowhere(path: Path) -> str:
    path.symlink_to("/proc/self/nowhere")
    return "No such file or directory"


@pytest.mark.parametrize("spoil", [a_file, for_all, nowhere])
def test_build_looks_first_whether_it_can_write(
    spec_file: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], str],
) -> None:
    monkeypatch.setattr(command_line, "compile_all", lambda *_, **__: pytest.fail("it compiles"))
    out = tmp_path / "image"
    problem = spoil(out)
    assert main(["build", str(spec_file), "--arch", ARCH, "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert problem in error
    assert str(out) in error or "/proc/" in error


def test_build_looks_first_whether_there_is_room(
    spec_file: Path, small_disk: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "compile_all", lambda *_, **__: pytest.fail("it compiles"))
    out = small_disk / "image"
    assert main(["build", str(spec_file), "--arch", ARCH, "--out", str(out)]) == 1
    assert os.strerror(errno.ENOSPC) in capsys.readouterr().err
    assert list(out.glob("v1/staging/*")) == []


def test_build_fails_where_no_worker_starts_and_this_process_cannot_compile(
    root: Path, spec_file: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    out = tmp_path / "image"
    assert main(["build", str(spec_file), "--arch", ARCH, "--out", str(out), "-j", "2"]) == 1
    captured = capsys.readouterr()
    assert "0 of 2 kernels" in captured.out
    assert captured.err.count("its process ended with status 1") == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"no \[\[operator\]\]"),
        ("not toml", "spec.toml"),
        ("[[operator]]\nplan = 'nowhere'", "has no plan"),
        ("[[operator]]\nplan = 'no_such_module:plan'", "no_such_module"),
        ("[[operator]]\nplan = 'toy_specs:no_such_plan'", "no_such_plan"),
        ("[[operator]]\nplan = 'toy_specs:plan_scale'\nfactor = 1.0", "factor=1.0"),
        (
            "[[operator]]\nplan = 'toy_specs:plan_scale'\nfactors = [1]",
            "factors is [1], must be a list[float]",
        ),
        ("[[operator]]\nplan = 'toy_specs:plan_scale'\nfactors = 1.0", "factors is 1.0, must"),
        ("[[operator]]\nplan = 'toy_specs:plan_wrong'", "must return pairs of KernelDef"),
        ("[[operator]]\nplan = 'toy_specs:plan_undeclared'", "is not declared as a plan"),
        ("[[operator]]\nplan = 'os:system'\ncommand = 'true'", "is not declared as a plan"),
        ("[[operator]]\nplan = 'toy_specs:plan_hopper'\narch = 90", "arch of operator 1"),
        ("[[operator]]\nplan = 'toy_specs:plan_hopper'\narch = 'h100'", "'h100' is not an arch"),
        ("[[operator]]\nplan = 'toy_specs:plan_hopper'\narch = 'sm_90'", "did you mean 'sm_90a'?"),
        ("operator = [1]", "operator 1 has no plan"),
    ],
)
def test_build_of_a_file_that_makes_no_sense(
    root: Path, tmp_path: Path, capsys: Capture, text: str, problem: str
) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    assert main(["build", str(path), "--arch", ARCH, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert problem.replace("\\", "") in error
    assert not (tmp_path / "out").exists()


def test_a_file_can_be_planned_without_the_command_line(spec_file: Path) -> None:
    planned = cache.plan_file(str(spec_file), ARCH)
    assert planned == [(SCALE, ScaleSpec(2.0)), (SCALE, ScaleSpec(3.0)), (SCALE, ScaleSpec(2.0))]


@pytest.mark.parametrize(
    ("arch", "problem"),
    [
        ("hopper", "'hopper' is not an architecture"),
        ("sm_90", "did you mean 'sm_90a'?"),
        ("sm_90a,sm_100f", "did you mean 'sm_100a'?"),
    ],
)
def test_build_for_an_arch_that_makes_no_sense(
    spec_file: Path, tmp_path: Path, capsys: Capture, arch: str, problem: str
) -> None:
    with pytest.raises(SystemExit) as wrong:
        main(["build", str(spec_file), "--arch", arch, "--out", str(tmp_path)])
    assert wrong.value.code == 2
    assert problem in capsys.readouterr().err


def test_the_module_runs(filled_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cute_attn.cache", "verify"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "1 entries intact" in done.stdout
