"""`python -m cute_attn`: version, environment, and where files lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import cute_attn

from .test_repository import PYPROJECT, ROOT

MODELS = sorted((ROOT / "cute_attn/models").glob("*.toml"))


def run(
    *arguments: str, python: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "-m", "cute_attn", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def facts(**environment: str) -> dict[str, str]:
    done = run("env", "--json", **environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_version_and_help() -> None:
    assert run("--version").stdout == f"cute_attn {cute_attn.__version__}\n"
    done = run()
    assert done.returncode == 0
    assert done.stdout == run("--help").stdout
    assert "python -m cute_attn.cache --help" in done.stdout


def test_models_are_where_it_says() -> None:
    assert run("models").stdout.splitlines() == [str(path) for path in MODELS]
    assert "vllm" in {path.stem for path in MODELS}
    for name in ("vllm", "vllm.toml"):
        assert run("models", name).stdout == f"{ROOT / 'cute_attn/models/vllm.toml'}\n"
    done = run("models", "gemma")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no gemma.toml, only kimi_training, " in done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["models"]])
def test_what_needs_no_compiler_loads_none(arguments: list[str]) -> None:
    program = (
        "import runpy, sys\n"
        "try: runpy.run_module('cute_attn', run_name='__main__', alter_sys=True)\n"
        "except SystemExit: print(*sys.modules)"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "cute_attn" in loaded
    assert not loaded & {"cutlass", "tvm_ffi", "torch", "numpy", "cuda", "rich", "cute_attn.cache"}


def test_the_environment_names_versions_and_settings(tmp_path: Path) -> None:
    found = facts(
        CUTE_ATTN_ARCH="sm_100a", CUTE_ATTN_CACHE_DIR=str(tmp_path), CUTE_ATTN_KDA_SPLIT="0"
    )
    assert found["cute_attn"] == f"{cute_attn.__version__}, {ROOT / 'cute_attn'}"
    for text in PYPROJECT["project"]["dependencies"]:
        requirement = Requirement(text)
        if not requirement.marker:
            try:
                expected = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:  # machines without a network may lack one
                expected = "not installed"
            assert found[requirement.name] == expected
    assert found["torch says"].startswith(metadata.version("torch"))
    assert found["architecture"] == "sm_100a"
    assert found["runtime library"].endswith("/libcute_dsl_runtime.so")
    assert found["cache directory"] == str(tmp_path)
    settings = {name: value for name, value in found.items() if name.startswith("setting ")}
    assert settings == {
        "setting scheduler": "static",
        "setting kda_split": "False",
        "setting workspace_bytes": str(2048 * 2**20),
        "setting emulate": "False",
        "setting server_kda": "False",
        "setting server_gdn": "False",
    }
    assert found["variable CUTE_ATTN_ARCH"] == "sm_100a"
    assert found["variable CUTE_ATTN_KDA_SPLIT"] == "0"
    assert "variable HOME" not in found


def test_what_is_broken_is_said_beside_the_rest(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13:\\nno such file')")
    found = facts(
        CUTE_ATTN_ARCH="hopper",
        CUTE_ATTN_CACHE_MAX_BYTES="much",
        CUTE_ATTN_EMULATE="yes",
        CUTE_ATTN_RUNTIME_LIBRARY="/no/such/file.so",
        PYTHONPATH=str(tmp_path),
    )
    assert found["torch says"] == "unknown (OSError: libcudart.so.13: no such file)"
    assert found["architecture"].startswith("unknown (ValueError: CUTE_ATTN_ARCH is 'hopper': ")
    assert "CUTE_ATTN_CACHE_MAX_BYTES: 'much'" in found["cache directory's limit"]
    assert "CUTE_ATTN_EMULATE is 'yes', must be 0 or 1" in found["setting emulate"]
    assert found["setting kda_split"] == "True"
    assert "/no/such/file.so: there is no such file" in found["runtime library"]


def test_the_environment_of_a_python_without_packages() -> None:
    """In a checkout that is not installed, so that there is no cute_attn.cache either."""
    done = run("env", python=("-S", "-E"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"cute_attn: {cute_attn.__version__}, {ROOT / 'cute_attn'}" in lines
    assert "torch: not installed" in lines
    assert "torch says: unknown (ModuleNotFoundError: No module named 'torch')" in lines
    assert "setting emulate: False" in lines
    (directory,) = (line for line in lines if line.startswith("cache directory: "))
    assert directory == (
        "cache directory: unknown (ModuleNotFoundError: No module named 'cute_attn.cache')"
    )


NVIDIA_SMI = """#!/bin/sh
case "$1" in
  --query-gpu=driver_version) echo 580.159.04; echo 580.159.04;;
  --query-gpu=name,compute_cap,memory.total) echo "A, 9.0, 81559 MiB"; echo "B, 10.0, 9 MiB";;
  *) exit 2;;
esac
"""


@pytest.mark.parametrize("works", [True, False])
def test_gpus_are_those_that_nvidia_smi_lists(works: bool, tmp_path: Path) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(NVIDIA_SMI if works else "#!/bin/sh\necho no driver\nexit 9\n")
    script.chmod(0o755)
    (tmp_path / "torch.py").touch()  # loads at once
    found = facts(PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHONPATH=str(tmp_path))
    gpus = {name: value for name, value in found.items() if name.startswith("GPU ")}
    listed = {"GPU 0": "A, 9.0, 81559 MiB", "GPU 1": "B, 10.0, 9 MiB"}
    assert gpus == (listed if works else {})
    assert found["driver"] == ("580.159.04" if works else "unknown (nvidia-smi does not tell)")
