"""Every family of operators has all that its record names, and nothing is outside of a record."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cute_attn
from cute_attn.bench.harness.registry import BENCHMARKS
from cute_attn.cache import KernelDef
from cute_attn.families import EXPORTS, FAMILIES, Family
from tests.gpu.test_sanitizers import FIRST_ARRIVALS, RINGS, STORES
from tests.ops.operators import OPERATORS
from tests.test_import import modules_after, run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cute_attn"
MODELS = sorted((PACKAGE / "models").glob("*.toml"))

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def test_the_record_is_plain_data() -> None:
    loaded = modules_after("import cute_attn.families")
    ours = {name for name in loaded if name.startswith("cute_attn.")}
    assert ours == {"cute_attn._version", "cute_attn.families"}
    assert not loaded & {"torch", "cutlass", "dataclasses", "inspect"}


# ---- public names


def test_type_checkers_see_the_public_names() -> None:
    """By the imports of cute_attn/__init__.py that only type checkers read."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.level == 1
        (alias,) = node.names
        assert alias.asname == alias.name, "or strict type checkers refuse it to users"
        seen[alias.name] = f"cute_attn.{node.module}"
    assert seen == EXPORTS


def test_a_star_import_gives_the_public_names() -> None:
    names = run("from cute_attn import *; print(*globals())").split()
    assert {name for name in names if not name.startswith("__")} == set(EXPORTS)
    assert cute_attn.__all__ == ["__version__", *sorted(EXPORTS)]


@each_family
def test_public_functions_are_where_the_record_says(family: Family) -> None:
    for entry in family.functions:
        function = pkgutil.resolve_name(entry)
        assert getattr(cute_attn, entry.partition(":")[2]) is function
        assert function.__module__.startswith(family.operators)
        assert function.__doc__


@each_family
def test_public_functions_are_documented(family: Family) -> None:
    text = "\n".join((ROOT / "docs" / page).read_text() for page in family.pages)
    shown = re.findall(r"^::: cute_attn\.ops\.(\S+)", text, re.M)
    names = {name.rpartition(".")[2] for name in shown}
    assert names >= {entry.partition(":")[2] for entry in family.functions}


# ---- parts


def kernels(module: str) -> list[KernelDef]:
    return [x for x in vars(importlib.import_module(module)).values() if isinstance(x, KernelDef)]


@each_family
def test_kernels_are_of_the_family(family: Family) -> None:
    listed = kernels(family.table)
    assert listed
    for kernel in listed:
        assert kernel.target.startswith(family.table.removesuffix("table"))
        path = ROOT / f"{kernel.target.partition(':')[0].replace('.', '/')}.py"
        assert f"class {kernel.target.partition(':')[2]}" in path.read_text()


def test_names_of_kernels_elsewhere_are_right() -> None:
    """In the guide for profiling, and in what compute-sanitizer's tests exempt."""
    classes = {k.target.partition(":")[2] for f in FAMILIES for k in kernels(f.table)}
    guide = (ROOT / "docs/guides/profile_a_kernel.md").read_text()
    rows = re.findall(r"^\| `\w+`[^|]*\|([^|]*)\|[^|]*\|$", guide, re.M)
    shown = set(re.findall(r"`([A-Z]\w+)`", "".join(rows)))
    assert len(shown) > len(FAMILIES) and shown <= classes
    assert {*RINGS, *STORES, *FIRST_ARRIVALS} <= classes


def test_every_table_and_operator_is_of_a_family() -> None:
    """But for kernels that families share, and those of studies."""
    folders = {path.parent.name for path in PACKAGE.glob("kernels/*/table.py")}
    folders -= {"async_copy", "common", "ladder"}
    assert {f"cute_attn.kernels.{folder}.table" for folder in folders} == {
        family.table for family in FAMILIES
    }
    shared = {"__init__", "checks", "counters", "devices", "memory", "operator", "__pycache__"}
    operators = {path.stem for path in PACKAGE.glob("ops/*")} - shared
    assert operators == {family.operators.rpartition(".")[2] for family in FAMILIES}


def test_every_reference_is_of_a_family() -> None:
    listed = {name for family in FAMILIES for name in family.reference}
    found = {f"cute_attn.reference.{path.stem}" for path in PACKAGE.glob("reference/*.py")}
    assert listed == found - {f"cute_attn.reference.{name}" for name in ("__init__", "rounding")}
    assert all(family.reference for family in FAMILIES)


def planned(path: Path) -> Iterator[str]:
    """The module of each plan of a spec file."""
    for table in tomllib.loads(path.read_text())["operator"]:
        yield table["plan"].partition(":")[0]


def test_spec_files_are_of_the_families_that_they_plan() -> None:
    for path in MODELS:
        planners = set(planned(path))
        of = {
            family.name
            for family in FAMILIES
            if any(f"{name}.".startswith(f"{family.operators}.") for name in planners)
        }
        assert of == {family.name for family in FAMILIES if path.name in family.spec_files}
        assert of
    assert {name for family in FAMILIES for name in family.spec_files} <= {p.name for p in MODELS}


@each_family
def test_rows_of_the_support_page_name_public_functions(family: Family) -> None:
    names = {entry.partition(":")[2] for entry in family.functions}
    assert {name for row in family.support for name in row.functions} == names
    assert {row.direction for row in family.support} <= {"forward", "backward"}


@each_family
def test_states_have_kernels_in_the_dtypes_that_are_listed(family: Family) -> None:
    for row in family.support:
        plan = pkgutil.resolve_name(row.plan)
        if "state_dtype" in inspect.signature(plan).parameters:
            assert all(plan("sm_90a", state_dtype=dtype) for dtype in row.states)


# ---- what tests and benchmarks have of each


@each_family
def test_every_operator_has_a_good_call(family: Family) -> None:
    """tests/ops/test_every_operator.py makes it."""
    called = [operator.function for operator in pkgutil.resolve_name(family.calls).values()]
    assert {pkgutil.resolve_name(entry) for entry in family.functions} <= {*called}
    assert {*called} <= {operator.function for operator in OPERATORS.values()}


@each_family
def test_every_family_has_small_calls_and_calls_on_other_gpus(family: Family) -> None:
    assert pkgutil.resolve_name(family.small_calls)
    covered = {
        name for call in pkgutil.resolve_name(family.other_gpus).values() for name, _ in call.covers
    }
    assert covered <= {name for row in family.support for name in row.functions}


@each_family
def test_every_family_has_tests_with_the_oldest_versions(family: Family) -> None:
    assert family.oldest
    assert all((ROOT / test).is_file() for test in family.oldest)


def test_benchmarks_of_a_folder_are_of_its_family() -> None:
    studies = {"async_copy", "ladder", "launch_times", "rates"}
    for name, listed in BENCHMARKS.items():
        folder, dot, _ = listed.module.partition(".")
        of = {family.name for family in FAMILIES if name in family.benchmarks}
        assert of == ({folder} if dot and folder not in studies else set()), name
