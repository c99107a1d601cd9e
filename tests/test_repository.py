"""What a release needs besides the code: packaging, correct documents, and the folder layout."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

from cute_attn.families import FAMILIES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEMPLATES = sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


# What measures and studies kernels. It has no use without the tests and docs of a checkout.
CHECKOUT_ONLY = (
    "cute_attn.bench",
    "cute_attn.kernels.async_copy",
    "cute_attn.kernels.ladder",
    "cute_attn.machine_code",
    "cute_attn.timing",
)


def package_files() -> dict[str, Path]:
    """Path below a folder of packages -> file here, for every file that belongs to a package."""
    files = {}
    for source, package in (("cute_attn", "cute_attn"), ("cache", "cute_attn/cache")):
        for path in (ROOT / source).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                files[f"{package}/{path.relative_to(ROOT / source).as_posix()}"] = path
    return files


def wheel_files() -> dict[str, Path]:
    """Path below a folder of packages -> file here, for every file of a wheel."""
    folders = tuple(f"{name.replace('.', '/')}/" for name in CHECKOUT_ONLY)
    return {name: path for name, path in package_files().items() if not name.startswith(folders)}


def load(script: str) -> ModuleType:
    """A script of the checkout as a module."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- layout


def test_what_the_top_level_holds() -> None:
    """A new top-level folder should be deliberate: most files belong in one of these."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    folders = {name.partition("/")[0] for name in listing.stdout.decode().split() if "/" in name}
    assert folders == {".ci", ".github", "cache", "cute_attn", "docs", "examples", "tests"}


# ---- packaging


def test_python_folders_are_packages() -> None:
    """A folder of modules without `__init__.py` is a package that the tests here do not see."""
    folders = {path.parent for path in package_files().values() if path.suffix == ".py"}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """What `make test-oldest` installs, which can be no other than what users are promised."""
    oldest = load(".ci/oldest.py").oldest
    requirements = PYPROJECT["project"]["dependencies"]
    pins = dict(pin.split("==") for pin in oldest(requirements, {"cu13"}))
    assert {"nvidia-cutlass-dsl[cu13]", "apache-tvm-ffi", "rich"} <= set(pins)
    assert "torch" not in pins
    for requirement in map(Requirement, requirements):
        extra = "[cu13]" if requirement.name == "nvidia-cutlass-dsl" else ""
        if f"{requirement.name}{extra}" in pins:
            version = pins[f"{requirement.name}{extra}"]
            assert f">={version}" in str(requirement.specifier).split(",")
    for bad in ("rich", "rich<14", "rich>13"):
        with pytest.raises(ValueError, match=r"rich.* has no lower bound to test"):
            oldest([bad])
    assert oldest(["tomli>=2; python_version < '3'"]) == []


def test_the_compiler_of_cuda_13_has_the_same_bounds() -> None:
    (plain,) = (
        Requirement(text)
        for text in PYPROJECT["project"]["dependencies"]
        if Requirement(text).name == "nvidia-cutlass-dsl"
    )
    (cu13,) = map(Requirement, PYPROJECT["project"]["optional-dependencies"]["cu13"])
    assert (cu13.name, cu13.specifier) == (plain.name, plain.specifier)


# ---- documents


def test_documented_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    used = {
        (document.name, target)
        for document in DOCUMENTS
        for target in re.findall(r"(?:`|^|&& )make ([a-z][a-z-]*)", document.read_text(), re.M)
    }
    assert ("README.md", "demo") in used
    assert {(name, target) for name, target in used if target not in targets} == set()


def examples() -> list[tuple[str, str]]:
    """(document, source) of every Python example."""
    return [
        (document.name, source)
        for document in DOCUMENTS
        for source in re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)
    ]


def test_examples_import_what_exists() -> None:
    missing = []
    for document, source in examples():
        for node in ast.walk(ast.parse(source, filename=document)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cute_attn"):
                module = importlib.import_module(node.module or "")
                missing += [
                    (document, node.module, alias.name)
                    for alias in node.names
                    if not hasattr(module, alias.name)
                ]
    assert "README.md" in dict(examples())
    assert missing == []


def test_links_of_the_top_documents_resolve() -> None:
    """mkdocs checks the links inside docs/; these files lie outside it."""
    broken = [
        (document.name, link)
        for document in ROOT.glob("*.md")
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
        if "://" not in link and not (ROOT / link).exists()
    ]
    assert broken == []


def test_environment_variables_are_documented() -> None:
    variable = re.compile(r"\bCUTE_ATTN_[A-Z_]*[A-Z]\b")
    read = {
        name
        for path in package_files().values()
        if path.suffix == ".py"
        for name in variable.findall(path.read_text())
    } - {"CUTE_ATTN_MLA"}  # a backend's name in vLLM
    page = (ROOT / "docs/environment.md").read_text()
    documented = set(re.findall(r"^\| `(CUTE_ATTN_[A-Z_]+)`", page, re.M))
    assert documented == read


def test_no_package_registry_is_named() -> None:
    """The package index is the choice of whoever installs the package."""
    registries = [
        ".".join(host)
        for host in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("download", "pytorch", "org"),
            ("pypi", "nvidia", "com"),
            ("anaconda", "org"),
            ("npmjs", "org"),
        )
    ]
    named = [(name, host) for name, text in tracked() for host in registries if host in text]
    assert named == []


def test_no_merge_is_left_unfinished() -> None:
    marker = re.compile(r"^(<{7}|>{7}) \S", re.M)
    assert [name for name, text in tracked() if marker.search(text)] == []


def tracked() -> Iterator[tuple[str, str]]:
    """The tracked files, and their text."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    for name in listing.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            yield name, (ROOT / name).read_bytes().decode(errors="replace")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_issue_templates_are_forms(path: Path) -> None:
    """By GitHub's rules; a form that breaks one is not shown. All ask for `env`'s output."""
    yaml = pytest.importorskip("yaml", reason="needs the extra docs")
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels"}
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in fields} <= {"textarea", "dropdown", "input", "checkboxes"}
    ids = [part["id"] for part in fields]
    labels = [part["attributes"]["label"] for part in fields]
    assert len({*ids}) == len(ids) > 0 and len({*labels}) == len(labels)
    assert any("`python -m cute_attn env`" in label for label in labels)
    assert any(part.get("validations", {}).get("required") for part in fields)


@pytest.mark.parametrize(("length", "refused"), [(72, False), (73, True)])
def test_commits_with_a_long_subject_are_refused(length: int, refused: bool) -> None:
    """As pre-commit's pygrep with --multiline does it; CONTRIBUTING.md has the rule."""
    yaml = pytest.importorskip("yaml", reason="needs the extra docs")
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (hook,) = (h for repo in settings["repos"] for h in repo["hooks"] if h["id"] == "subject")
    assert (hook["language"], hook["args"]) == ("pygrep", ["--multiline"])
    assert hook["stages"] == ["commit-msg"]
    assert set(settings["default_install_hook_types"]) == {"pre-commit", "commit-msg"}
    message = f"{'x' * length}\n\n{'y' * 100}\n".encode()
    found = re.search(hook["entry"].encode(), message, re.MULTILINE | re.DOTALL)
    assert (found is not None) == refused
    assert "at most 72 characters" in (ROOT / "CONTRIBUTING.md").read_text()


# ---- docstrings

# Beginnings by which a docstring refers to a neighbour that its reader may not see.
PRONOUNS = re.compile(r"(The same|Those|That of|As of)\b")


def beginnings_with_a_pronoun(source: str) -> list[tuple[int, str]]:
    """Line and first line of each docstring, attributes' included, that begins with a pronoun."""
    return [
        (node.lineno, text.strip().partition("\n")[0])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(text := node.value.value, str) and PRONOUNS.match(text.strip())
    ]


def test_docstrings_name_their_subject() -> None:
    """An editor or a page shows a docstring without the one before it."""
    paths = {
        path.relative_to(ROOT).as_posix(): path
        for folder in ("cache", "cute_attn", "docs", "examples", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {"cache/jit.py", "cute_attn/launch.py", "tests/test_repository.py"} <= paths.keys()
    quoted = re.compile(rf"[\"']\s*{PRONOUNS.pattern}")  # few files have it, and need parsing
    found = [
        f"{name}:{line}: {text}"
        for name, path in sorted(paths.items())
        if quoted.search(source := path.read_text())
        for line, text in beginnings_with_a_pronoun(source)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("docstring", "refused"),
    [
        ("The same for keys.", True),
        ("Those of x.\n\nMore.", True),
        ("\n    That of `wrap`.", True),
        ("As of many sequences.", True),
        ("The rows of x, in the same order as those of y.", False),
        ("Thoseness.", False),
    ],
)
def test_docstrings_that_begin_with_a_pronoun_are_found(docstring: str, refused: bool) -> None:
    for source in ("{}", "def f():\n    {}", "class C:\n    x = 1\n    {}"):
        before = source.partition("{}")[0].count("\n")
        found = beginnings_with_a_pronoun(source.format(repr(docstring)))
        assert [line for line, _ in found] == ([before + 1] if refused else [])


# ---- rooms: which may import which (docs/design.md)

# Where a family of kernels names them to the cache, which device code must know nothing of.
TABLES = {family.table for family in FAMILIES} | {
    f"cute_attn.kernels.{folder}.table" for folder in ("async_copy", "common", "ladder")
}

ATTENTION = "cute_attn/kernels/attention"
ATTENTION_ROOMS = ("any", "parts", "sm90", "sm100")

FORBIDDEN = {
    "cache": {"cute_attn", "torch"},
    # Kernels of a room import its own parts and those of all; the folder itself knows no room.
    **{
        f"{ATTENTION}/{room}": {
            f"{ATTENTION.replace('/', '.')}.{other}"
            for other in ATTENTION_ROOMS
            if other not in (room, "parts")
        }
        for room in ATTENTION_ROOMS
    },
    **{
        f"{ATTENTION}/{path.name}": {
            "cutlass",
            *(f"{ATTENTION.replace('/', '.')}.{room}" for room in ATTENTION_ROOMS),
        }
        for path in sorted((ROOT / ATTENTION).glob("*.py"))
    },
    "cute_attn/emulator": {
        "cutlass",
        "cute_attn.bench",
        "cute_attn.cache",
        "cute_attn.kernels",
        "cute_attn.launch",
        "cute_attn.ops",
        "cute_attn.reference",
    },
    "cute_attn/compat": {
        "cutlass",
        "cute_attn.bench",
        "cute_attn.cache",
        "cute_attn.emulator",
        "cute_attn.kernels",
        "cute_attn.launch",
        "cute_attn.reference",
    },
    "cute_attn/integrations": {
        "cutlass",
        "cute_attn.bench",
        "cute_attn.cache",
        "cute_attn.emulator",
        "cute_attn.kernels",
        "cute_attn.launch",
        "cute_attn.reference",
    },
    "cute_attn/kernels": {
        "torch",
        "cute_attn.bench",
        "cute_attn.cache",
        "cute_attn.emulator",
        "cute_attn.launch",
        "cute_attn.ops",
        "cute_attn.reference",
        *TABLES,
    },
    "cute_attn/__main__.py": {"cutlass", "cute_attn.kernels", "cute_attn.ops"},
    "cute_attn/launch.py": {
        "cutlass",
        "cute_attn.bench",
        "cute_attn.kernels",
        "cute_attn.ops",
        "cute_attn.reference",
    },
    "cute_attn/emulation.py": {
        "cutlass",
        "torch",
        "cute_attn.bench",
        "cute_attn.kernels",
        "cute_attn.launch",
        "cute_attn.ops",
        "cute_attn.reference",
    },
    "cute_attn/machine_code": {
        "cutlass",
        "torch",
        "cute_attn.bench",
        "cute_attn.cache",
        "cute_attn.emulator",
        "cute_attn.kernels",
        "cute_attn.launch",
        "cute_attn.ops",
        "cute_attn.reference",
    },
    "cute_attn/timing": {
        "cutlass",
        "torch",
        "cute_attn.bench",
        "cute_attn.cache",
        "cute_attn.kernels",
        "cute_attn.launch",
        "cute_attn.ops",
        "cute_attn.reference",
    },
    "cute_attn/families.py": {"cutlass", "torch", "cute_attn", "dataclasses"},
    "cute_attn/settings.py": {"cutlass", "torch", "cute_attn"},
    "cute_attn/ops": {
        "cutlass",
        "cute_attn.bench",
        "cute_attn.integrations",
        "cute_attn.reference",
    },
    "cute_attn/reference": {
        "cutlass",
        "tvm_ffi",
        "cute_attn.bench",
        "cute_attn.cache",
        "cute_attn.kernels",
        "cute_attn.launch",
        "cute_attn.ops",
    },
}

ALLOWED = {
    # A torch dtype in a worker's request, which only a caller that has torch can have put there.
    ("cute_attn/cache/wire.py", "torch"),
    # The compiler's classes that ask for a device or keep code, changed for a whole program.
    *(
        ("cute_attn/emulator/scripts/dsl.py", f"cutlass{name}")
        for name in (
            ".base_dsl",
            ".base_dsl.compiler",
            ".base_dsl.jit_executor",
            ".base_dsl.runtime",
            ".base_dsl.runtime.cuda",
            ".cute.testing",
            ".cutlass_dsl",
            ".cutlass_dsl.cuda_jit_executor",
            ".cutlass_dsl.tvm_ffi_provider",
            ".testing",
            ".utils",
            ".utils.HardwareInfo",
        )
    ),
    # KernelDef, with which a table names kernels.
    *(
        (f"{table.replace('.', '/')}.py", module)
        for table in TABLES
        for module in ("cute_attn.cache", "cute_attn.cache.KernelDef")
    ),
}


@functools.cache
def imports(name: str, path: Path) -> frozenset[str]:
    """The modules that an installed file imports anywhere in its text, as absolute names."""
    package = name.split("/")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            match node.args:
                case [ast.Constant(str(module)), *_] if not module.startswith("."):
                    found.add(module)
    return frozenset(found)


def within(module: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of these, or in one of them."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def test_nothing_shipped_imports_tests() -> None:
    """An sdist holds no tests."""
    wrong = {
        (name, module)
        for name, path in package_files().items()
        if path.suffix == ".py"
        for module in imports(name, path)
        if within(module, ["tests"])
    }
    assert wrong == set()


def test_a_wheel_imports_only_what_it_holds() -> None:
    """tests/test_installed.py imports it; this also sees imports in functions."""
    files = wheel_files()
    assert "cute_attn/__main__.py" in files and "cute_attn/bench/__main__.py" not in files
    wrong = {
        (name, module)
        for name, path in files.items()
        if path.suffix == ".py"
        for module in imports(name, path)
        if within(module, CHECKOUT_ONLY)
    }
    assert wrong == set()


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_import_in_one_direction(room: str) -> None:
    files = {
        name: path
        for name, path in package_files().items()
        if path.suffix == ".py" and path.is_relative_to(ROOT / room)
    }
    assert files
    wrong = {
        (name, module)
        for name, path in files.items()
        for module in imports(name, path)
        if within(module, FORBIDDEN[room])
        if not (room == "cache" and module.startswith("cute_attn.cache"))
        if (name, module) not in ALLOWED
    }
    assert wrong == set()


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Imports within functions count as well: modules of a cycle must be read together."""
    files = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): (name, path)
        for name, path in package_files().items()
        if path.suffix == ".py"
    }
    assert {"cute_attn.cache.jit", "cute_attn.ops.operator"} <= files.keys()
    graph = {}
    for module, (name, path) in files.items():
        known = imports(name, path) & files.keys() - {module}
        # `from package import submodule` names both; the package itself may import its parts.
        graph[module] = {m for m in known if not any(other.startswith(f"{m}.") for other in known)}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
