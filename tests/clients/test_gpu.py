"""Rows of the table of clients that need a GPU: PyTorch's compiler and graphs around our kernels.

The tests are those of tests/gpu and tests/integrations.
"""

from __future__ import annotations

import pytest

from tests.gpu import test_attention as attention
from tests.gpu import test_every_operator as every_operator
from tests.integrations import test_compat as compat
from tests.integrations import test_torch_sdpa as sdpa
from tests.integrations.test_torch_sdpa import registry

from .rows import shows

__all__ = ["registry"]  # a fixture

pytestmark = pytest.mark.gpu

GRAPHS = "CUDA graphs of each of our functions, replayed for other tensors: the bits of eager calls"
STEP = "A CUDA graph of a training step: forward, backward and optimiser"
DECODING = "A CUDA graph of `flash_attn_with_kvcache`, which follows lengths and pages"
COMPILED = "`torch.compile(fullgraph=True)` by Inductor: forward and backward"
SDPA = "`scaled_dot_product_attention` after activation: eager and compiled, with gradients"

test_graphs = shows(GRAPHS, every_operator.test_a_graph_gives_what_eager_calls_give)
test_step = shows(STEP, attention.test_a_graph_of_a_training_step)
test_decoding = shows(DECODING, compat.test_steps_of_decoding_in_a_graph)
test_compiled = shows(COMPILED, attention.test_a_compiled_step)
test_sdpa = shows(SDPA, sdpa.test_scaled_dot_product_attention_on_a_gpu)
