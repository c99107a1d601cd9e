"""The reports that docs/guides/debug_a_kernel.md quotes are what the emulator says of its bugs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn.emulator import Emulator, FindingsError

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs/guides/debug_a_kernel.md").read_text()
(KERNEL,) = re.findall(r"```python\n(# ring\.py\n.*?)```", GUIDE, re.DOTALL)

READ = '            total += tiles[barriers.stage("full", n) * WIDTH + lane]\n'
RELEASE = '            barriers.warp_arrives("empty", n)\n'
STORE = 'tiles[barriers.stage("full", n) * WIDTH + lane] ='

# Heading -> what is replaced by what, the schedule, and whether the sums are right.
BUGS = {
    "A hang": (RELEASE, "            pass\n", "random", False),
    "A wrong number": (STORE, "tiles[lane] =", "fair", False),
    "A race that gives the right number": (READ + RELEASE, RELEASE + READ, "adversarial", True),
}
LOGIC = ("x[n * WIDTH + lane]", "x[n + lane]")


def ring(folder: Path, old: str, new: str) -> Any:
    """The guide's module with one replacement."""
    assert KERNEL.count(old) == 1
    path = folder / "ring.py"
    path.write_text(KERNEL.replace(old, new))
    spec = importlib.util.spec_from_file_location("ring", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums, and the right ones."""
    x = torch.arange(float(module.TILES * module.WIDTH))
    y = torch.empty(module.WIDTH)
    emulator = Emulator(num_sms=1, seed=1, **options)
    emulator.load(module.compiled, module.names)(x, y)
    return y, x.view(module.TILES, module.WIDTH).sum(0)


def normal(line: str) -> str:
    """Without the numbers that another version of the compiler may choose otherwise."""
    return re.sub(r"PTX line \d+|%\w+|\+-?\d+", "_", line)


def quoted(heading: str) -> list[str]:
    section = GUIDE.split(f"## {heading}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    lines: list[str] = block.splitlines()
    return lines


@pytest.mark.parametrize("heading", BUGS)
def test_a_report_is_what_the_emulator_says(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the compiler leaves the PTX in the current folder
    old, new, schedule, right = BUGS[heading]
    module = ring(tmp_path, old, new)
    with pytest.raises(FindingsError) as raised:
        run(module, schedule=schedule)
    said = str(raised.value).replace(f"{tmp_path}/", "").splitlines()
    for line in quoted(heading):
        assert normal(line) in map(normal, said)
    if heading != "A hang":
        y, sums = run(module, schedule=schedule, on_findings="collect")
        assert torch.equal(y, sums) == right


def test_a_wrong_formula_has_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    y, sums = run(ring(tmp_path, *LOGIC), schedule="random")
    for values in (y, sums):
        assert str(values[:4].tolist()) in " ".join(GUIDE.split())
