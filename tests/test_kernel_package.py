"""The package as a kernel of Hugging Face `kernels`, which loads a folder under another name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import cute_attn
from cute_attn import kernel_package

from .test_repository import PYPROJECT, ROOT

NAME = "_cute_attn_" + cute_attn.__version__.replace(".", "_")

# As kernels 0.17's `_import_from_path` does.
LOAD = """
import importlib.util, json, sys
from pathlib import Path
folder = Path(sys.argv[1])
name = json.loads((folder / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
kernel = importlib.util.module_from_spec(spec)
sys.modules[name] = kernel
spec.loader.exec_module(kernel)
"""
REAL = """
import importlib, kernels, sys
from pathlib import Path
kernel = kernels.get_local_kernel(Path(sys.argv[1]).parents[1], backend="cpu")
"""
NAMES = """
import torch
from importlib.util import find_spec
for public in kernel.__all__:
    getattr(kernel, public)
kernel.register_operators()
families = importlib.import_module(f"{kernel.__name__}.families").FAMILIES
for family in families:
    for defined in vars(importlib.import_module(family.table)).values():
        if type(defined).__name__ == "KernelDef":
            assert find_spec(defined.module).origin.startswith(sys.argv[1]), defined
assert not [x for x in sys.modules if x.partition(".")[0] == "cute_attn"]
import cute_attn  # both may be loaded at once
assert cute_attn.flash_attn_func is not kernel.flash_attn_func
cute_attn.register_operators()
operators = torch.ops.cute_attn, getattr(torch.ops, kernel.__name__)
print(kernel.__name__, *(x.flash_attn for x in operators))
"""
CALL = """
o_partial, lse_partial = torch.randn(2, 1, 3, 2, 64), torch.randn(2, 1, 3, 2)
with kernel.emulated("sm_90a"):
    o, lse = kernel.flash_attn_combine(o_partial, lse_partial)
weights = torch.softmax(lse_partial, dim=0)[..., None]
torch.testing.assert_close(o, (o_partial * weights).sum(dim=0))
"""


def loaded(program: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [NAME, "cute_attn.flash_attn", f"{NAME}.flash_attn"]


def test_it_has_the_files_of_a_wheel(tmp_path: Path) -> None:
    folder = kernel_package.write(tmp_path)
    assert folder == tmp_path / "build" / "torch-cuda"
    excluded = PYPROJECT["tool"]["setuptools"]["exclude-package-data"]["cute_attn"]
    assert {f"{name}/*" for name in kernel_package.LEFT_OUT} == set(excluded)
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    sources = {Path("cache", path.name) for path in (ROOT / "cache").glob("*.py")} | {
        path.relative_to(ROOT / "cute_attn")
        for path in (ROOT / "cute_attn").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    kept = {
        path
        for path in sources
        if not any(path.is_relative_to(name) for name in kernel_package.LEFT_OUT)
    }
    assert found == kept | {Path("metadata.json")}
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["id"], metadata["backend"]) == (NAME, {"type": "cuda"})
    with pytest.raises(FileExistsError, match="torch-cuda exists: remove it"):
        kernel_package.write(tmp_path)
    with pytest.raises(ValueError, match="must be one of cuda, cpu"):
        kernel_package.write(tmp_path, "rocm")


def test_it_works_under_another_name(tmp_path: Path) -> None:
    loaded(LOAD + NAMES, kernel_package.write(tmp_path, "cpu"))


@pytest.mark.slow
def test_a_call_under_another_name(tmp_path: Path) -> None:
    loaded(LOAD + NAMES + CALL, kernel_package.write(tmp_path, "cpu"))


@pytest.mark.slow
def test_kernels_loads_it(tmp_path: Path) -> None:
    pytest.importorskip("kernels", reason="needs Hugging Face kernels")
    loaded(REAL + NAMES + CALL, kernel_package.write(tmp_path, "cpu"))


WARM = """
from importlib import import_module
plan = import_module(f"{name}.ops.lightning").plan_decode
kernels = [
    request
    for dtype in ("bfloat16", "float16")
    for request in plan("sm_90a", dtype=dtype, head_dim_k=64, head_dim_v=64)
]
report = kernel.warmup(kernels, arch="sm_90a", jobs=2)
print(len(report.compiled), report.compiled[0].target)
"""


@pytest.mark.slow
def test_processes_that_compile_load_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kernel_package.write(tmp_path, "cpu")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    command = [sys.executable, "-c", LOAD + WARM, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["2", f"{NAME}.kernels.lightning.decode:LightningDecode"]
