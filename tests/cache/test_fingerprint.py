"""The fingerprint: what a kernel can execute counts, and nothing else does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cute_attn.cache import CacheError
from cute_attn.cache.fingerprint import read_source_digests

Package = Callable[[dict[str, str]], Path]

# Every module would raise if it were imported.
_BOMB = "\nraise RuntimeError('imported')\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Write a package named ``pkg``: path -> text."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / "pkg" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + _BOMB)
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path / "pkg"

    return write


def modules(module: str) -> set[str]:
    return {name for name, _ in read_source_digests(module, "pkg")}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import os, torch.nn", set()),
        ("from pkg.common.softmax import scale", {"pkg.common.softmax"}),
        ("from .common.softmax import scale", {"pkg.common.softmax"}),
        ("from .common import softmax", {"pkg.common.softmax"}),
        ("from .common import softmax as s, masks", {"pkg.common.softmax", "pkg.common.masks"}),
        ("from . import other", {"pkg.other"}),
        ("from .common import helper", {"pkg.common", "pkg.common.masks"}),
        ("from .common import *", {"pkg.common", "pkg.common.masks"}),
        ("import pkg.common.softmax as s", {"pkg.common.softmax"}),
        (
            "import pkg.common.softmax",
            {"pkg", "pkg.common", "pkg.common.masks", "pkg.common.softmax"},
        ),
        ("def f():\n    from .common import softmax", {"pkg.common.softmax"}),
        ("try:\n    import x\nexcept ImportError:\n    from . import other", {"pkg.other"}),
        ("if 1:\n    pass\nelse:\n    from . import other", {"pkg.other"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import other", set()),
        (
            "import typing\nif typing.TYPE_CHECKING:\n    from . import other\n"
            "else:\n    from .common import softmax",
            {"pkg.common.softmax"},
        ),
        ("x = 'from . import other'", set()),
        ("from pkgother import x", set()),
    ],
)
def test_imports_are_followed(package: Package, statement: str, expected: set[str]) -> None:
    package(
        {
            "__init__.py": "",
            "kernel.py": statement,
            "other.py": "",
            "common/__init__.py": "from .masks import helper",
            "common/softmax.py": "import math",
            "common/masks.py": "",
        }
    )
    assert modules("pkg.kernel") == {"pkg.kernel"} | expected
    assert "pkg" not in sys.modules


def test_a_name_that_hides_a_module_counts_with_the_module(package: Package) -> None:
    package(
        {
            "__init__.py": "",
            "kernel.py": "from .common import softmax",
            "common/__init__.py": "def softmax(): ...",
            "common/softmax.py": "",
        }
    )
    assert modules("pkg.kernel") == {"pkg.kernel", "pkg.common", "pkg.common.softmax"}


def test_imports_are_followed_through_modules_and_in_circles(package: Package) -> None:
    package(
        {
            "__init__.py": "",
            "a/__init__.py": "",
            "a/kernel.py": "from ..b.one import x",
            "b/__init__.py": "",
            "b/one.py": "from . import two",
            "b/two.py": "from .one import x\nfrom ..c import three",
            "c/three.py": "",  # c is a namespace package
            "unused.py": "",
        }
    )
    assert modules("pkg.a.kernel") == {"pkg.a.kernel", "pkg.b.one", "pkg.b.two", "pkg.c.three"}


def test_only_what_the_kernel_uses_changes_the_fingerprint(package: Package) -> None:
    path = package(
        {
            "__init__.py": "",
            "kernel.py": "from .common import softmax",
            "other_kernel.py": "from .common import softmax",
            "common/__init__.py": "",
            "common/softmax.py": "",
            "common/masks.py": "",
        }
    )
    (path / "guide.md").write_text("a document")
    before = read_source_digests("pkg.kernel", "pkg")
    for unrelated in ("guide.md", "other_kernel.py", "__init__.py", "common/masks.py"):
        (path / unrelated).write_text("changed = 1")
        assert read_source_digests("pkg.kernel", "pkg") == before
    for used in ("kernel.py", "common/softmax.py"):
        with (path / used).open("a") as file:
            file.write("# changed\n")
        after = read_source_digests("pkg.kernel", "pkg")
        assert after != before
        before = after


def test_a_missing_module_is_an_error_that_names_it(package: Package) -> None:
    package({"__init__.py": ""})
    with pytest.raises(CacheError, match=r"'pkg\.nowhere'"):
        read_source_digests("pkg.nowhere", "pkg")


def test_a_module_that_is_not_python_is_an_error_that_names_it(package: Package) -> None:
    path = package({"__init__.py": "", "kernel.py": ""})
    (path / "kernel.py").write_text("def (")
    with pytest.raises(CacheError, match=r"kernel\.py is not valid Python"):
        read_source_digests("pkg.kernel", "pkg")


def test_the_real_package_is_found_through_an_editable_install() -> None:
    names = {name for name, _ in read_source_digests("cute_attn.launch", "cute_attn")}
    assert "cute_attn.launch" in names
