"""`import cute_attn` is cheap, whatever the package grows to hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cute_attn


def run(code: str) -> str:
    """Run `code` in a fresh process and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(statement: str) -> set[str]:
    return set(run(f"import sys\n{statement}\nprint(*sys.modules, sep='\\n')").split())


def test_import_loads_no_compiler_and_no_kernel() -> None:
    loaded = modules_after("import cute_attn")
    assert "cute_attn" in loaded
    assert not loaded & {"cutlass", "tvm_ffi", "torch", "numpy"}
    assert {name for name in loaded if name.startswith("cute_attn.")} == {"cute_attn._version"}


def test_operators_load_no_compiler() -> None:
    """Neither the kernels' compiler nor torch's, which takes as long to import as torch."""
    loaded = modules_after("import cute_attn\nfor x in cute_attn.__all__: getattr(cute_attn, x)")
    assert "torch" in loaded
    assert not loaded & {"cutlass", "tvm_ffi", "torch._dynamo"}


def test_dir_lists_what_is_not_loaded_yet() -> None:
    listed = run("import cute_attn; print(*dir(cute_attn))").split()
    assert set(cute_attn.__all__) <= set(listed)


def test_importing_the_cache_loads_nothing_else() -> None:
    loaded = modules_after("from cute_attn import cache")
    assert "cute_attn.cache" in loaded
    assert not loaded & {"cutlass", "tvm_ffi", "torch", "cuda", "platformdirs"}
    assert not {
        name
        for name in loaded
        if name.startswith("cute_attn.") and not name.startswith("cute_attn.cache")
    } - {"cute_attn._version", "cute_attn.families"}


@pytest.mark.parametrize("name", cute_attn.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(cute_attn, name) is getattr(cute_attn, name)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match=r"module 'cute_attn' has no attribute 'no_such_name'"):
        _ = cute_attn.no_such_name
