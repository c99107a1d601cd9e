"""Puts SGLang's scheduler on the CPU, with an H100 that our emulator stands for.

SGLang has a CPU platform, whose layers are written in PyTorch. MODULES names what SGLang imports
for this platform and its list of packages leaves out. Of these modules, FUNCTIONS alone are called.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

ENVIRONMENT = {
    "CUTE_ATTN_EMULATE": "1",
    "HF_HUB_OFFLINE": "1",  # models are directories
    "SGLANG_SWA_EVICTION_INTERVAL": "1",  # a short test frees slots before a window
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",  # SGLang allocates pages by kernels in Triton
}

MODULES = {
    "sgl_kernel": "is imported; of it, SGLang calls only the functions below",
    "sgl_kernel.mamba": "likewise",
    "sgl_kernel.speculative": "likewise",
    "torchaudio": "is imported, not called: decodes sound",
    **dict.fromkeys(
        (
            "torchvision",
            "torchvision.io",
            "torchvision.transforms",
            "torchvision.transforms.functional",
            "torchvision.transforms.v2",
            "torchvision.transforms.v2.functional",
        ),
        "is imported, not called: decodes images",
    ),
}


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write each draft token's position, and the links of its tree to children and siblings."""
    n = draft_token_num
    tree = tree_mask.view(batch_size, n, n).tril(-1)  # [b, i, j]: j is above i
    nodes = torch.arange(n)
    parent = torch.where(tree, nodes, -1).amax(2)
    positions.copy_((tree.sum(2) + verified_seq_len[:, None]).flatten())
    retrieve_index.copy_(torch.arange(batch_size * n).view(batch_size, n))
    later = nodes[:, None] > nodes  # [k, i]: k is after i
    siblings = (parent[:, :, None] == parent[:, None, :]) & (parent[:, None, :] >= 0) & later
    for links, out in ((tree, retrieve_next_token), (siblings, retrieve_next_sibling)):
        first = torch.where(links, nodes[:, None], n).amin(1)
        out.copy_(torch.where(first < n, first, -1))


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write the slots of tokens start_offset to end_offset - 1 of each request."""
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    slots = torch.cat([req_to_token[row, start:end] for row, start, end in rows])
    out_cache_loc[: len(slots)] = slots


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Note the slots of tokens start_offset to end_offset - 1 of each request."""
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    at = 0
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start]
        at += end - start


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copy slots of pools, given by address and bytes of a slot."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow each request's tree of drafts as far as the model predicts its tokens."""
    wanted = target_predict.flatten()
    for b, (tokens, index, child, sibling) in enumerate(
        zip(
            candidates.tolist(),
            retrive_index.tolist(),
            retrive_next_token.tolist(),
            retrive_next_sibling.tolist(),
            strict=True,
        )
    ):
        node, accepted = 0, 0
        accept_index[b, 0] = index[0]
        while accepted + 1 < accept_index.shape[1]:
            at = child[node]
            while at >= 0 and tokens[at] != wanted[index[node]]:
                at = sibling[at]
            if at < 0:
                break
            predicts[index[node]] = wanted[index[node]]
            node, accepted = at, accepted + 1
            accept_index[b, accepted] = index[node]
        accept_token_num[b] = accepted
        predicts[index[node]] = wanted[index[node]]


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Write the slots of accepted tokens, one after another."""
    accepted = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


class Stub(NamedTuple):
    """A function of a missing module, with the same arithmetic in PyTorch.

    Attributes:
        reason: why SGLang calls the function.
    """

    function: Callable[..., None]
    reason: str


FUNCTIONS = {
    "sgl_kernel": (
        Stub(
            assign_extend_cache_locs_cpu, "draft tokens' slots, which are a Triton kernel on a GPU"
        ),
        Stub(assign_req_to_token_pool_cpu, "notes slots of draft tokens, likewise"),
        Stub(copy_all_layer_kv_cache_cpu, "moves keys and values of accepted drafts, likewise"),
        Stub(fill_accept_out_cache_loc_cpu, "the slots of accepted drafts, likewise"),
        Stub(verify_tree_greedy_cpu, "accepts drafts, which is a CUDA kernel on a GPU"),
    ),
    "sgl_kernel.speculative": (
        Stub(reconstruct_indices_from_tree_mask, "the links of a tree of drafts, likewise"),
    ),
}


class Missing(ModuleType):
    """A module from which any name can be imported, and none can be called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*arguments: Any, **named: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} is a stub: {MODULES[self.__name__]}")

        return missing


class Stubs(MetaPathFinder, Loader):
    """Finds MODULES."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Missing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for stub in FUNCTIONS.get(module.__name__, ()):
            setattr(module, stub.function.__name__, stub.function)


def import_gated_delta_net() -> None:
    """Import SGLang's modules of the Gated Delta Net as on a GPU: see IN_TESTS."""
    from sglang.srt import utils
    from sglang.srt.layers.attention.linear import kda_backend  # noqa: F401, what both import

    with mock.patch.object(utils, "is_cpu", return_value=False):
        from sglang.srt.layers.attention.linear import gdn_backend  # noqa: F401


def convolve(x: Tensor, past: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """silu of the convolution of x, `[channels, tokens]`, after `past`; and x with its past."""
    inputs = torch.cat([past, x], dim=1)
    y = F.conv1d(inputs[None].float(), weight[:, None].float(), groups=len(weight))[0]
    return F.silu(y).to(x.dtype), inputs


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any,
) -> Tensor:
    """Stands in for SGLang's function of this name, on `[channels, tokens]`."""
    out = torch.empty_like(x)
    spans = itertools.pairwise(query_start_loc.tolist())
    for i, (start, end) in enumerate(spans):
        state = conv_states[cache_indices[i]]
        past = state if has_initial_state[i] else torch.zeros_like(state)
        out[:, start:end], inputs = convolve(x[:, start:end], past, weight)
        state.copy_(inputs[:, inputs.shape[1] - state.shape[1] :])
    return out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: None,
    activation: str,
    *,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    **trees: None,
) -> Tensor:
    """Stands in for SGLang's function of this name, on `[batch, channels]` or, for drafts,
    `[batch, channels, tokens]`. Drafts leave the state as it is, and write a window for each."""
    assert not any(x is not None for x in trees.values())
    rows = x.unsqueeze(-1) if x.dim() == 2 else x
    out = torch.empty_like(rows)
    for i, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        state = conv_state[slot]
        out[i], inputs = convolve(rows[i], state, weight)
        width = state.shape[1]
        if intermediate_conv_window is None:
            state.copy_(inputs[:, inputs.shape[1] - width :])
            continue
        for t in range(rows.shape[2]):
            at = intermediate_state_indices[i], t
            intermediate_conv_window[at] = inputs[:, t + 1 : t + 1 + width]
    return out.view(x.shape)


def scatter_mamba_states_after_mtp_verify(
    caches: Any, slots: Tensor, last_steps: Tensor, *tracked: None, src_indices_raw: None = None
) -> None:
    """Stands in for SGLang's Triton kernel, which copies each request's state after its last
    accepted draft to the pool."""
    rows = torch.arange(len(last_steps))
    pairs = [(caches.temporal, caches.intermediate_ssm)]
    pairs += zip(caches.conv, caches.intermediate_conv_window, strict=True)
    for pool, drafts in pairs:
        pool[:, slots.long()] = drafts[:, rows, last_steps]


def replace_in_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backends of linear layers need: see IN_TESTS."""
    import_gated_delta_net()
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.linear import gdn_backend, kda_backend

    for stub in (causal_conv1d_fn, causal_conv1d_update):
        for module in (gdn_backend, kda_backend):
            monkeypatch.setattr(module, stub.__name__, stub)
    name = scatter_mamba_states_after_mtp_verify.__name__
    monkeypatch.setattr(hybrid_linear_attn_backend, name, scatter_mamba_states_after_mtp_verify)


def refuse_their_kernels(monkeypatch: pytest.MonkeyPatch, kernels: type) -> list[str]:
    """Make calls of a class of SGLang's kernels for linear layers raise; returns a list that will
    name such calls."""
    called: list[str] = []
    for name in ("decode", "packed_decode", "extend", "target_verify"):

        def refuse(*_: Any, name: str = name, **__: Any) -> None:
            called.append(name)
            raise NotImplementedError(name)

        monkeypatch.setattr(kernels, name, refuse)
    return called


# What a single test file replaces.
IN_TESTS = (
    (
        "causal_conv1d_fn, causal_conv1d_update, scatter_mamba_states_after_mtp_verify",
        "convolutions of linear layers, and copies of accepted states: Triton kernels on a GPU",
    ),
    (
        "gdn_backend.is_cpu, gdn_triton.is_cpu",
        "the Gated Delta Net has a path of its own on a CPU",
    ),
)


def stand_ins() -> list[tuple[str, str]]:
    """(what, why) for the table in docs/clients.md."""
    packages = [(name, why) for name, why in MODULES.items() if "." not in name]
    functions = [
        (f"{module}.{stub.function.__name__}", stub.reason)
        for module, stubs in FUNCTIONS.items()
        for stub in stubs
    ]
    amx = "SGLang has compiled kernels for such processors: PyTorch's take their place"
    return [*packages, *functions, ("torch.cpu._is_amx_tile_supported", amx), *IN_TESTS]


def install() -> None:
    """Make SGLang, which must not be imported yet, run as above."""
    assert "sglang" not in sys.modules
    os.environ.update(ENVIRONMENT)
    torch.cpu._is_amx_tile_supported = lambda: False
    import transformers  # noqa: F401, which must not find a stub

    sys.meta_path.append(Stubs())
