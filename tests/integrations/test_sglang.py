"""SGLang's attention backend, as far as it needs no SGLang: tests/clients has the real one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.integrations import token_slots
from cute_attn.ops.attention.support import forward_head_dims

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def test_the_entry_point_registers_the_backend(monkeypatch: pytest.MonkeyPatch):
    choices: list[list[str]] = [["triton"], ["fa3"], [], ["flashmla"]]
    backends: dict[str, Any] = {}
    modules = {
        "sglang.srt.arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": choices[0],
            "add_attention_backend_choices": choices[0].extend,
            "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": choices[1],
            "add_deterministic_attention_backend_choices": choices[1].extend,
            "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": choices[2],
            "add_radix_supported_deterministic_attention_backend_choices": choices[2].extend,
            "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS": choices[3],
            "add_chunked_prefix_cache_attention_backend": choices[3].append,
        },
        "sglang.srt.layers.attention.attention_registry": {
            "register_attention_backend": lambda name: lambda made: backends.update({name: made}),
        },
    }
    for path, names in modules.items():
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)
    groups = ModuleType("sglang.srt.arg_groups")
    vars(groups).update(choices=sys.modules["sglang.srt.arg_groups.choices"])
    monkeypatch.setitem(sys.modules, groups.__name__, groups)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (path,) = project["entry-points"]["sglang.srt.plugins"].values()
    name, _, function = path.partition(":")
    for _ in range(2):
        getattr(importlib.import_module(name), function)()
    assert choices == [
        ["triton", "cute_attn"], ["fa3", "cute_attn"], ["cute_attn"], ["flashmla", "cute_attn"],
    ]  # fmt: skip
    assert list(backends) == ["cute_attn"]
    assert "cute_attn.integrations.sglang_backend" not in sys.modules


def test_page_tables():
    """Requests whose pages are in any order, in a table whose rows have older entries."""
    page_size, pages = 16, torch.tensor([[4, 2, 7], [1, 9, 0], [5, 3, 6]])
    tokens = torch.arange(40)  # of 48: the last page is not full
    slots = torch.zeros(5, 45, dtype=torch.int32)
    for row, of_row in zip((1, 4, 2), pages, strict=True):
        slots[row, :40] = of_row[tokens // page_size] * page_size + tokens % page_size
    assert token_slots.num_pages(slots.shape[1], page_size) == 3
    for rows in ([1, 4, 2], [2], []):
        wanted = torch.stack([pages[(1, 4, 2).index(row)] for row in rows]) if rows else pages[:0]
        out = torch.empty(len(rows), 3, dtype=torch.int32)
        first = token_slots.first_slots(slots, torch.tensor(rows, dtype=torch.int64), page_size)
        token_slots.write_page_table(out, first, page_size)
        assert torch.equal(out, wanted.int())


def test_starts():
    out = torch.full((5,), -1, dtype=torch.int32)
    token_slots.write_starts(out, torch.tensor([3, 0, 5, 1]))
    assert out.tolist() == [0, 3, 3, 8, 9]
    token_slots.write_starts(out[:1], torch.tensor([], dtype=torch.int64))
    assert out[0] == 0


@pytest.mark.parametrize(
    ("arch", "found"),
    [
        (
            "sm_90a",
            [(64, 64), (128, 128), (192, 128), (256, 256), (320, 256), (512, 512), (576, 512)],
        ),
        ("sm_100a", [(256, 256)]),
    ],
)
def test_head_dims(arch: str, found: list[tuple[int, int]]):
    with cute_attn.emulated(arch, Emulator()):
        assert list(forward_head_dims(torch.device("cpu"))) == found
    with cute_attn.emulated("sm_80", Emulator()):
        assert forward_head_dims(torch.device("cpu")) == ()
