"""Rows of the table of clients: PyTorch's own calls, and those of packages for attention.

Most tests are those of tests/integrations and tests/ops.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import test_code_blocks as code_blocks
from tests.integrations import test_compat as compat
from tests.integrations import test_compat_flash_attn_3 as flash_attn_3
from tests.integrations import test_compat_flash_mla as flash_mla
from tests.integrations import test_torch_dtensor as dtensor
from tests.integrations import test_torch_sdpa as sdpa
from tests.integrations.test_torch_sdpa import active, emulated, registry
from tests.ops import test_attention as attention
from tests.ops import test_attention_arguments as arguments
from tests.ops import test_every_operator as every_operator
from tests.test_code_blocks import folder

from .rows import shows

__all__ = ["active", "emulated", "folder", "registry"]  # fixtures

COMPILED = "Each of our functions under `torch.compile(fullgraph=True)`: the bits of eager calls"
SDPA = "`scaled_dot_product_attention`: registration, forward and backward"
SDPA_COMPILED = "`scaled_dot_product_attention` in one compiled graph"
VARLEN = "`torch.nn.attention.varlen`: windows, and K and V in pages"
DTENSOR = "DTensor: heads or sequences sharded over two processes"
NESTED = "Nested tensors: an error that says how to call `flash_attn_varlen_func`"
FLASH_ATTN_2 = "FlashAttention 2's functions: forward, backward, options, compiled"
KV_CACHE = "`flash_attn_with_kvcache`: new rows appended, rotary, pages, compiled"
FLASH_ATTN_3 = "FlashAttention 3's functions, with a KV cache"
FLASH_ATTN_4 = "FlashAttention-4's functions: the names, order and defaults of its arguments"
FLASHINFER = "FlashInfer's page indices, by [the recipe](migration.md#flashinfer)"
FLASH_MLA = "FlashMLA's decode functions"

test_compiled_code = shows(COMPILED, attention.test_compiled_code_calls_the_kernel)
test_compiled_calls = shows(COMPILED, every_operator.test_compiled_code_gives_what_eager_code_gives)
test_registration = shows(SDPA, sdpa.test_registration_activation_and_restoration)
test_forward = shows(SDPA, sdpa.test_forward_agrees_with_the_reference)
test_gradients = shows(SDPA, sdpa.test_gradients_agree_with_the_reference)
test_one_graph = shows(SDPA_COMPILED, sdpa.test_a_step_compiles_into_one_graph)
test_windows = shows(VARLEN, sdpa.test_varlen_attention_agrees_with_the_reference)
test_pages = shows(VARLEN, sdpa.test_varlen_attention_reads_pages)
test_shards = shows(DTENSOR, dtensor.test_dtensors_agree_with_the_reference)
test_nested = shows(NESTED, arguments.test_nested_tensors)
test_dense = shows(FLASH_ATTN_2, compat.test_dense_functions_agree_with_the_reference, "emulated")
test_options = shows(FLASH_ATTN_2, compat.test_options_agree_with_the_reference, "emulated")
test_packed = shows(FLASH_ATTN_2, compat.test_packed_functions_agree_with_the_reference, "emulated")
test_packed_gradients = shows(
    FLASH_ATTN_2, compat.test_gradients_go_through_packed_tensors, "emulated"
)
test_compiles = shows(FLASH_ATTN_2, compat.test_functions_compile_into_one_graph, "emulated")
test_appends = shows(KV_CACHE, compat.test_new_rows_are_appended_and_seen, "emulated")
test_rotates = shows(KV_CACHE, compat.test_rotated_rows_are_appended_and_seen, "emulated")
test_reads_pages = shows(KV_CACHE, compat.test_packed_queries_read_pages, "emulated")
test_decoding = shows(KV_CACHE, compat.test_a_step_of_decoding_compiles_into_one_graph, "emulated")
test_functions = shows(
    FLASH_ATTN_3, flash_attn_3.test_functions_agree_with_the_reference, "emulated"
)
test_cache = shows(FLASH_ATTN_3, flash_attn_3.test_packed_queries_see_pages, "emulated")
test_flash_attn_4 = shows(FLASH_ATTN_4, arguments.test_signatures_are_flash_attentions)
test_flash_mla = shows(FLASH_MLA, flash_mla.test_the_calls_of_its_readme)


@pytest.mark.clients(FLASHINFER)
@pytest.mark.slow
def test_flashinfer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (x for x in code_blocks.PYTHON if "Of FlashInfer's wrappers" in x.code)
    code_blocks.test_python_emulated(block, folder, monkeypatch)
