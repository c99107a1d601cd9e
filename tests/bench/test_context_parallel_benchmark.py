"""The benchmark of context parallelism: its cases, and a tiny run over gloo in the emulator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cute_attn.bench.__main__ import main
from cute_attn.bench.attention import context_parallel
from cute_attn.bench.attention.context_parallel import MODES, Case, cases, takes


def work(case: Case) -> int:
    """Pairs of queries and keys, of all heads, about."""
    keys = case.window
    pairs = sum(n * (n // 2 if keys is None else keys) for n in case.lengths)
    return pairs * case.heads


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_part_has_its_share_of_the_work(world: int) -> None:
    table = cases(world)
    assert len({case.name for case in table}) == len(table)
    assert {2**14 * world, 2**15 * world, 2**17} == {
        case.lengths[0] for case in table if case.name.startswith("GQA")
    }
    for case in table:
        part = case.part(world)
        assert part.heads_k >= 1
        assert work(part) * world == pytest.approx(work(case))


def test_modes_take_cases_whose_heads_they_can_share_out() -> None:
    case = cases(4)[0]
    assert [takes(case, mode, 4) for mode in MODES] == [True] * 4
    few = case._replace(heads_k=2)
    assert [mode for mode in MODES if takes(few, mode, 4)] == ["gather", "ring", "mesh"]
    assert not takes(case, "mesh", 2)


def rows_of(monkeypatch: pytest.MonkeyPatch, seconds: float = 1.0, **options: Any) -> list[Any]:
    """(case, mode) of each row of a table whose cases take `seconds` each."""
    now = [0.0]

    def rows(case: Any, modes: tuple[str, ...] = ("states",), *_: Any) -> Iterator[Any]:
        now[0] += seconds
        yield from ((getattr(case, "name", "decode"), mode) for mode in modes)

    monkeypatch.setattr(context_parallel.time, "time", lambda: now[0])
    monkeypatch.setattr(context_parallel, "measured", rows)
    monkeypatch.setattr(context_parallel, "decoded", lambda *_: rows(None, ("calls",)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return list(context_parallel.table(tiny=True, short=False, **options))
    finally:
        dist.destroy_process_group()


def test_chosen_modes_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows_of(monkeypatch, modes=("ring", "chosen"), budget=1e9)
    names = ["GQA", "window", "documents"]
    chosen = [*((name, "chosen") for name in names), ("decode", "calls")]
    assert found == [*chosen, *((name, "ring") for name in names)]
    assert rows_of(monkeypatch, modes=("chosen",), budget=1e9, wanted=("ind", "deco")) == [
        ("window", "chosen"), ("decode", "calls"),
    ]  # fmt: skip


def test_no_case_begins_that_would_end_late(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(rows_of(monkeypatch, modes=("chosen",), budget=2.5)) == 2


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = ["context-parallel", "--tiny", "--short", "--print-only", "--json", str(file)]
    assert main(command) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["mode"] for row in rows] == ["chosen", "calls"]
    assert all(row["gpus"] == 2 and row["share_of_ideal_forward"] > 0 for row in rows)
