"""The installed package: a wheel in a fresh virtual environment, outside of the checkout.

What the package requires is linked into the environments from where the tests run: they need no
network, and hold nothing that was not asked for.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import cute_attn

from . import beside
from .test_repository import CHECKOUT_ONLY, PYPROJECT, ROOT, package_files, wheel_files

# What only compiling takes.
COMPILER = {"nvidia-cutlass-dsl", "pyelftools"}
SPEC = """
[[operator]]
plan = "cute_attn.ops.lightning:plan_decode"
dtype = "bfloat16"
head_dim_k = 128
head_dim_v = 128
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist built from a copy of the checkout."""
    work = tmp_path_factory.mktemp("release")
    checkout = work / "checkout"
    (checkout / "tests").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "tests/test_import.py"):
        shutil.copy(ROOT / name, checkout / name)
    for name in ("cute_attn", "cache"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    build_sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(work)!r})"
    subprocess.run([sys.executable, "-c", build_sdist], cwd=checkout, check=True)
    (built,) = work.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """A wheel built from the sdist, so that both are complete.

    Or the one that is about to be released, which the environment's WHEEL names.
    """
    if "WHEEL" in os.environ:
        return Path(os.environ["WHEEL"])
    build_wheel = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, "-m", *build_wheel, str(sdist)], cwd=sdist.parent, check=True)
    (built,) = sdist.parent.glob("*.whl")
    return built


class Environment:
    """A virtual environment with some distributions that are installed here."""

    def __init__(self, directory: Path, distributions: Iterable[str]) -> None:
        self.home = directory
        venv.create(directory / "venv", symlinks=True)
        self.python = directory / "venv/bin/python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.packages = directory / "venv/lib" / version / "site-packages"
        for name in distributions:
            self.link(name)

    def install(self, package: Path, *options: str) -> None:
        """Install a wheel, or a source tree with pip's `options` that say how."""
        install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", *options]
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), *install, str(package)]
        subprocess.run(pip, check=True, cwd=self.home)

    def link(self, name: str) -> None:
        """Make a distribution's files appear here, but for its scripts."""
        files = metadata.distribution(name).files
        if files is None:
            pytest.skip(f"what {name} consists of is not recorded here")
        for file in files:
            part = Path(file.parts[0]) if file.parts[0] in _unshared() else Path(file)
            target = self.packages / part
            if ".." in file.parts or file.suffix == ".pyc" or target.is_symlink():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(files[0].locate().parents[len(files[0].parts) - 1] / part)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python without settings of the user or the tests."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CUTE_ATTN_", "PYTHON"))
        }
        return subprocess.run(
            [self.python, *arguments],
            cwd=self.home,
            env={**kept, "HOME": str(self.home), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def tell(self, program: str, *arguments: str, **environment: str) -> Any:
        """The last line of output, as JSON, of a program that must succeed."""
        done = self.run("-c", program, *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def _unshared() -> set[str]:
    """The top-level packages here that one distribution has to itself."""
    return {name for name, owners in metadata.packages_distributions().items() if len(owners) == 1}


def required(names: Iterable[str]) -> set[str]:
    """Distributions, and all that they require in turn, by canonical name."""
    found: set[str] = set()
    pending = [Requirement(name) for name in names]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        pending += map(Requirement, metadata.requires(name) or ())
    return found


@pytest.fixture(scope="module")
def default(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment as `pip install cute-attn` makes it."""
    names = required(PYPROJECT["project"]["dependencies"])
    environment = Environment(tmp_path_factory.mktemp("default"), names)
    environment.install(wheel)
    return environment


# ---- contents


def test_sdist_holds_all_packages_and_nothing_else(sdist: Path) -> None:
    """No tests: they need most of the checkout."""
    with tarfile.open(sdist) as archive:
        names = {file.name.partition("/")[2] for file in archive.getmembers() if file.isfile()}
    sources = {path.relative_to(ROOT).as_posix() for path in package_files().values()}
    made = {name for name in names if re.match("PKG-INFO$|setup.cfg$|cute_attn.egg-info/", name)}
    assert names - made == sources | {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}


def test_wheel_holds_what_users_call_and_nothing_else(wheel: Path) -> None:
    """Not what measures and studies kernels."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == set(wheel_files())
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_default_install_works(default: Environment) -> None:
    """What is imported, started, built and found comes from the wheel."""
    from cute_attn.emulator import build

    told = default.tell(
        "import json, pathlib, cute_attn, cute_attn.cache as c\n"
        "from cute_attn.emulator import build\n"
        f"build.directory = pathlib.Path({str(build.directory)!r})\n"
        "print(json.dumps({'version': cute_attn.__version__,"
        " 'files': [m.__file__ for m in (cute_attn, c, build)],"
        " 'engine': str(build.engine_library())}))"
    )
    names = ("__init__.py", "cache/__init__.py", "emulator/build.py")
    assert told == {
        "version": cute_attn.__version__,
        "files": [str(default.packages / "cute_attn" / name) for name in names],
        "engine": str(build.engine_library()),  # by its digest, of the same sources as here
    }
    for module in ("cute_attn", "cute_attn.cache"):
        done = default.run("-m", module, "--help")
        assert done.returncode == 0, done.stderr
        assert f"usage: python -m {module}" in done.stdout


IMPORT_ALL = """
import importlib.util, json, pathlib, sys, cute_attn
root = pathlib.Path(cute_attn.__file__).parents[1]
files = [path.relative_to(root).with_suffix("") for path in root.glob("cute_attn/**/*.py")]
names = {".".join(file.parts).removesuffix(".__init__") for file in files}
servers = "backend", "mla_backend", "kda", "delta_rule", "gated_delta_rule"  # classes of servers
names -= {f"cute_attn.integrations.{x}_{name}" for x in ("sglang", "vllm") for name in servers}
names.remove("cute_attn.pytest_emulate")  # pytest imports it
for name in names:
    importlib.import_module(name)
absent = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps([sorted({*sys.modules} & names), absent]))
"""


def test_every_module_can_be_imported(default: Environment) -> None:
    """Without what only a checkout has, all extras, and libraries that measure."""
    loaded, absent = default.tell(IMPORT_ALL, *CHECKOUT_ONLY)
    assert {"cute_attn.environment", "cute_attn.kernels.delta.step.decode"} <= set(loaded)
    assert absent == list(CHECKOUT_ONLY)


def test_the_environment_of_an_installed_package_can_be_told(default: Environment) -> None:
    done = default.run("-m", "cute_attn", "env", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["cute_attn"] == f"{cute_attn.__version__}, {default.packages / 'cute_attn'}"
    assert told["commit"] == "not of a checkout"


# ---- types

TYPED = """
import cute_attn
from cute_attn import cache, chunk_kda

kernel = cute_attn.flash_attn_func or chunk_kda
compiles: int = cute_attn.cache.stats().compiles
version: str = cute_attn.__version__
cache.freeze(3)
"""
# The cache is what an ordinary editable install hides. All of torch would take a minute.
UNTYPED = """
[mypy]
strict = True
[mypy-torch.*,cute_attn.ops.*,cute_attn.launch,cute_attn.emulation]
follow_imports = skip
"""


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_a_users_code_is_checked_against_our_types(
    editable: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("mypy", reason="needs the extra lint")
    if editable:
        page = (ROOT / "docs/installation.md").read_text()
        (command,) = re.findall(r"^pip install (.*) --editable \.$", page, re.M)
        with tarfile.open(request.getfixturevalue("sdist")) as archive:
            archive.extractall(tmp_path, filter="data")
        (source,) = tmp_path.glob("cute_attn-*")
        options = (*shlex.split(command), "--no-build-isolation", "--editable")
        environment = Environment(tmp_path, ["setuptools"])
        environment.install(source, *options)
        assert not (environment.packages / "cute_attn").exists()
    else:
        environment = request.getfixturevalue("default")
    (tmp_path / "user.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text(UNTYPED)
    options = ("--config-file=mypy.ini", "--cache-dir=/dev/null", "user.py")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", environment.python, *options]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        'user.py:8: error: Too many arguments for "freeze"  [call-arg]',
        "Found 1 error in 1 file (checked 1 source file)",
    ]


# ---- beside servers


@pytest.mark.parametrize("server", beside.recorded())
def test_what_we_and_a_server_require_can_be_met(server: str) -> None:
    theirs = beside.recorded()[server]["requires"]
    assert {"apache-tvm-ffi", "nvidia-cutlass-dsl", "torch", "transformers"} <= {
        Requirement(text).name for text in theirs
    }
    assert beside.conflicts(theirs, beside.ours()) == []


def test_a_conflict_with_a_server_is_seen() -> None:
    mine = [Requirement("apache_tvm_ffi>=0.1.15,<0.2"), Requirement("torch>=2.6")]
    assert beside.conflicts(["apache-tvm-ffi==0.1.11", "torch==2.14.0"], mine) == [
        "apache_tvm_ffi<0.2,>=0.1.15 here, apache-tvm-ffi==0.1.11 there"
    ]


@pytest.mark.slow  # it asks the package index about 200 packages
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("server", beside.recorded())
def test_pip_finds_versions_for_us_beside_a_server(server: str, wheel: Path) -> None:
    known = beside.recorded()[server]
    wanted = f"{server}=={known['version']}"
    if platform.python_version() not in SpecifierSet(known["requires_python"]):
        pytest.skip(f"{wanted} needs Python {known['requires_python']}")
    try:
        published = beside.release(wanted)
    except beside.PipError as error:
        pytest.skip(f"pip finds no {wanted} here: {error}")
    assert published == known, "python -m tests.beside records it"
    extras = ",".join(beside.EXTRAS)
    found = beside.resolve(wanted, f"cute-attn[{extras}] @ {wheel.as_uri()}")
    assert found[server]["version"] == known["version"]
    assert found["cute-attn"]["version"] == cute_attn.__version__
    for requirement in beside.ours():
        if not requirement.marker or requirement.marker.evaluate():
            assert found[requirement.name]["version"] in requirement.specifier


# ---- serving: no compiler


def test_what_a_server_installs_is_what_the_package_requires_but_for_the_compiler() -> None:
    page = (ROOT / "docs/installation.md").read_text()
    section = re.search(r"^## Serving without the compiler\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert section is not None
    (commands,) = re.findall(r"^```bash\n(.*?)^```", section[1], re.M | re.S)
    installed = {
        str(Requirement(word)) for word in shlex.split(commands, comments=True) if ">=" in word
    }
    assert installed == {
        str(Requirement(text))
        for text in PYPROJECT["project"]["dependencies"]
        if Requirement(text).name not in COMPILER
    }


@pytest.fixture(scope="module")
def prebuilt(default: Environment) -> Path:
    """A directory of kernels, built by the default install for a GPU that is not here."""
    (default.home / "spec.toml").write_text(SPEC)
    arguments = ("build", "spec.toml", "--arch", "sm_90a", "--out", "kernels", "-j", "1")
    done = default.run("-m", "cute_attn.cache", *arguments)
    assert done.returncode == 0, done.stderr
    return default.home / "kernels"


@pytest.fixture(scope="module")
def server(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What docs/installation.md says for servers, but for the runtime library."""
    requirements = PYPROJECT["project"]["dependencies"]
    names = required(r for r in requirements if Requirement(r).name not in COMPILER)
    assert not [name for name in names if name.startswith("nvidia-cutlass-dsl")]
    environment = Environment(tmp_path_factory.mktemp("server"), names)
    environment.install(wheel)
    return environment


SERVE = """
import importlib.util, json, os, sys
import torch, cute_attn
from cute_attn import cache, launch
from cute_attn.ops.lightning import plan_decode

def plan(head_dim):
    return plan_decode("sm_90a", dtype="bfloat16", head_dim_k=head_dim, head_dim_v=head_dim)

def error_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

assert importlib.util.find_spec("cutlass") is None
told = {"without library": error_of(cute_attn.warmup, plan(128), arch="sm_90a")}
os.environ["CUTE_ATTN_RUNTIME_LIBRARY"] = sys.argv[1]
cute_attn.warmup(plan(128), arch="sm_90a")
kernel = launch.get(*plan(128)[0], "sm_90a")
told["refused"] = error_of(kernel, *range(11))
told["not prebuilt"] = error_of(launch.get, *plan(64)[0], "sm_90a")
cache.freeze()
told["frozen"] = error_of(launch.get, *plan(64)[0], "sm_90a")
print(json.dumps({**told, **cache.stats()._asdict()}))
"""


def tree(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in directory.rglob("*")
    }


def test_a_server_without_the_compiler_loads_prebuilt_kernels(
    default: Environment, server: Environment, prebuilt: Path, tmp_path: Path
) -> None:
    shutil.copytree(prebuilt, tmp_path / "kernels")
    before = tree(tmp_path / "kernels")
    done = default.run("-m", "cute_attn.cache", "path", "--runtime-library")
    library = Path(done.stdout.rstrip("\n"))
    flavour = library.parts[-3]
    (tmp_path / flavour).mkdir()
    copy = shutil.copy(library, tmp_path / flavour)
    told = server.tell(
        SERVE,
        copy,
        CUTE_ATTN_PREBUILT=str(tmp_path / "kernels"),
        CUTE_ATTN_CACHE_DIR="/proc/nowhere",  # nothing can be written there
    )
    assert "pip install --no-deps nvidia-cutlass-dsl-libs-cu12" in told["without library"]
    assert (told["prebuilt_hits"], told["compiles"]) == (1, 0)
    # The kernel's own host code refuses it, before it would ask for a GPU.
    assert "Mismatched type on argument #0" in told["refused"]
    assert told["not prebuilt"].startswith("CompileError: lightning_decode")
    assert "nvidia-cutlass-dsl cannot be imported" in told["not prebuilt"]
    assert "CUTE_ATTN_PREBUILT" in told["not prebuilt"]
    assert told["frozen"].startswith("FrozenCacheMiss")
    assert tree(tmp_path / "kernels") == before

    distribution = f"nvidia-cutlass-dsl-libs-{flavour}"
    server.link(distribution)  # as pip does with --no-deps
    told = server.tell(
        "import json; from importlib.util import find_spec; from cute_attn.cache import toolchain\n"
        "path, cuda = toolchain.runtime_library()\n"
        "print(json.dumps([str(path), cuda, toolchain.dsl_version(),"
        " toolchain.runtime_version(), find_spec('cutlass')]))"
    )
    found = server.packages / library.relative_to(default.packages)
    assert told == [str(found), flavour, None, metadata.version(distribution), None]
