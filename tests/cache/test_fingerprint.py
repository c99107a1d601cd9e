"""The fingerprint covers the code that a kernel can execute, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cute_attn.cache import CacheError, fingerprint
from cute_attn.cache.fingerprint import read_fingerprint

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


def read_source_digests(*where: Any) -> tuple[tuple[str, str], ...]:
    return read_fingerprint(*where).sources


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


LAZY = """
import importlib
def __getattr__(name):
    if name not in {names}:
        raise AttributeError(name)
    return getattr(importlib.import_module({module}, __name__), name)
"""
TABLE = "_WHERE = {'scale': 'softmax', 'mask': 'masks'}\n"


@pytest.mark.parametrize(
    ("lazy", "statement", "expected"),
    [
        # the module that the name is mapped to, in any of the usual forms
        (TABLE + LAZY.format(names="_WHERE", module="'.' + _WHERE[name]"), "scale", {"softmax"}),
        (
            "_WHERE = {'scale': 'pkg.common.softmax'}\n"
            + LAZY.format(names="_WHERE", module="_WHERE[name]"),
            "scale",
            {"softmax"},
        ),
        (
            "_WHERE = {'.softmax': ['scale', 'shift'], '.masks': ['mask']}\n"
            "_NAMES = {n: m for m, names in _WHERE.items() for n in names}\n"
            + LAZY.format(names="_NAMES", module="_NAMES[name]"),
            "scale",
            {"softmax"},
        ),
        (
            "from somewhere import attach\n__getattr__, __dir__, __all__ = attach(\n"
            "    __name__, submod_attrs={'softmax': ['scale'], 'masks': ['mask']})",
            "mask",
            {"masks"},
        ),
        # every module that a string names, where the name is mapped to none
        (
            "def __getattr__(name):\n    for where in ('softmax', 'masks'):\n"
            "        module = __import__(f'{__name__}.{where}', fromlist=['x'])\n",
            "scale",
            {"softmax", "masks"},
        ),
        (
            "def __getattr__(name):\n    from .softmax import scale\n    return scale",
            "scale",
            {"softmax"},
        ),
        # whatever is in a lazy package, where the package itself is used
        (TABLE + LAZY.format(names="_WHERE", module="_WHERE[name]"), None, {"softmax", "masks"}),
        (TABLE + LAZY.format(names="_WHERE", module="_WHERE[name]"), "*", {"softmax", "masks"}),
        # nothing of what is lazy, where what is bound is imported
        (TABLE + "x = 1\n" + LAZY.format(names="_WHERE", module="_WHERE[name]"), "x", set()),
    ],
)
def test_lazy_packages_are_followed(
    package: Package, lazy: str, statement: str | None, expected: set[str]
) -> None:
    imported = f"from .common import {statement}" if statement else "from . import common"
    package(
        {
            "__init__.py": "",
            "kernel.py": imported,
            "common/__init__.py": lazy,
            "common/softmax.py": "",
            "common/masks.py": "",
            "common/other.py": "",
        }
    )
    found = {f"pkg.common.{name}" for name in expected}
    assert modules("pkg.kernel") == {"pkg.kernel", "pkg.common"} | found


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import importlib\nm = importlib.import_module('pkg.other')", {"pkg.other"}),
        ("from importlib import import_module\nm = import_module('.other', 'pkg')", {"pkg.other"}),
        ("import importlib\nm = importlib.import_module('.other', __package__)", {"pkg.other"}),
        ("m = __import__('pkg.other')", {"pkg", "pkg.other"}),
        ("m = __import__('other', globals(), locals(), ['x'], 1)", {"pkg.other"}),
        ("m = __import__('other', level=1)", {"pkg.other"}),
        (
            "import importlib\nKINDS = {'a': 'pkg.other', 'b': 'pkg.third'}\n"
            "def load(kind):\n    return importlib.import_module(KINDS[kind])",
            {"pkg.other", "pkg.third"},
        ),
    ],
)
def test_calls_that_import_are_followed(
    package: Package, statement: str, expected: set[str]
) -> None:
    package({"__init__.py": "", "kernel.py": statement, "other.py": "", "third.py": ""})
    assert modules("pkg.kernel") == {"pkg.kernel"} | expected


def test_what_cannot_be_followed_is_reported_and_can_be_declared(
    package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    package(
        {
            "__init__.py": "",
            "kernel.py": "import importlib\nm = importlib.import_module('pkg.k_' + input())",
            "parts/__init__.py": "from ..used import x",
            "parts/a.py": "",
            "parts/more/b.py": "",
            "parts/more/__init__.py": "",
            "used.py": "",
            "other.py": "",
        }
    )
    assert modules("pkg.kernel") == {"pkg.kernel"}
    assert "pkg.kernel imports by a computed name" in caplog.text
    declared = read_source_digests("pkg.kernel", "pkg", ("pkg.parts", "pkg.other"))
    assert {name for name, _ in declared} == {
        "pkg.kernel",
        "pkg.parts",
        "pkg.parts.a",
        "pkg.parts.more",
        "pkg.parts.more.b",
        "pkg.used",
        "pkg.other",
    }
    with pytest.raises(CacheError, match=r"'pkg\.nowhere'"):
        read_source_digests("pkg.kernel", "pkg", ("pkg.nowhere",))


def test_other_packages_count_by_their_sources_or_their_version(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(
        {
            "__init__.py": "",
            "kernel.py": "import cutlass, numpy, os, absent\nfrom beside.tools import f\n"
            "from installed import g\nfrom cute_attn import cache",
        }
    )
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "tools.py").write_text("from . import deeper")
    (tmp_path / "beside" / "deeper.py").write_text("import installed")
    site = tmp_path / "site-packages"
    (site / "installed").mkdir(parents=True)
    (site / "installed" / "__init__.py").write_text("")
    (site / "a_name-1.5.dist-info").mkdir()
    (site / "a_name-1.5.dist-info" / "METADATA").write_text("Name: a-name\nVersion: 1.5\n")
    (site / "a_name-1.5.dist-info" / "top_level.txt").write_text("installed\n")
    monkeypatch.syspath_prepend(str(site))
    fingerprint._distributions.cache_clear()
    read = read_fingerprint("pkg.kernel", "pkg")
    assert {name for name, _ in read.sources} == {"pkg.kernel", "beside.tools", "beside.deeper"}
    assert dict(read.packages) == {
        "absent": None,
        "installed": "a-name 1.5",
        "numpy": f"numpy {metadata.version('numpy')}",
    }
    fingerprint._distributions.cache_clear()


def test_the_module_of_the_specialisation_counts(package: Package) -> None:
    package({"__init__.py": "", "kernel.py": "", "spec.py": "from . import base", "base.py": ""})
    read = read_source_digests("pkg.kernel", "pkg", (), "pkg.spec")
    assert {name for name, _ in read} == {"pkg.kernel", "pkg.spec", "pkg.base"}
    assert modules("pkg.kernel") == {"pkg.kernel"}


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
