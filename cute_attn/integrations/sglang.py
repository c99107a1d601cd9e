"""SGLang: `--attention-backend cute_attn`.

SGLang loads `register` as a plugin (`sglang.srt.plugins`) in each of its processes, if this package
is installed beside SGLang. The backends themselves are in `sglang_backend` and, for models with
latent attention, `sglang_mla_backend`, which are imported once a user chooses the backend.
"""

from __future__ import annotations

import pkgutil
from typing import Any

from ..settings import settings

__all__ = ["register", "register_attention"]

NAME = "cute_attn"
BACKEND = "cute_attn.integrations.sglang_backend:CuteAttnBackend"
MLA_BACKEND = "cute_attn.integrations.sglang_mla_backend:CuteAttnMLABackend"


def register() -> None:
    """Register this package with SGLang: its attention, and on request linear layers.

    `CUTE_ATTN_SERVER_KDA=1` in the environment asks for KDA (`sglang_kda.register`), and
    `CUTE_ATTN_SERVER_GDN=1` for the Gated Delta Net (`sglang_gated_delta_rule.register`).
    """
    register_attention()
    if settings().server_kda:
        from . import sglang_kda

        sglang_kda.register()
    if settings().server_gdn:
        from . import sglang_gated_delta_rule

        sglang_gated_delta_rule.register()


def register_attention() -> None:
    """Register this package's attention as SGLang's attention backend `cute_attn`.

    SGLang uses the backend only on request:
    `sglang serve --model-path MODEL --attention-backend cute_attn --page-size 64`. On Hopper the
    page size may be any number, as SGLang's default of 1. On Blackwell it is a multiple of 16.

    The backend serves decoder layers with head_dim 64, 128 or 256 on Hopper and 256 on Blackwell,
    in bfloat16 or float16, with a KV cache of the same dtype: prefill, chunked prefill and decode,
    prefixes of the radix cache, sliding windows with and without a pool of their own, softcap,
    sinks, GQA, and CUDA graphs. In speculative decoding, the backend verifies chains of draft
    tokens, and on Hopper trees, in models without sliding windows. With
    `--enable-deterministic-inference`, the bits of a request do not depend on the batch.

    On Hopper, the backend also serves models with latent attention (MLA: DeepSeek V3, Kimi Linear).
    Pages may have any multiple of 16 tokens. Decode, and the verification of chains of up to 16
    draft tokens, read the latent cache, with CUDA graphs. Prefill runs in the expanded form, also
    after a cached prefix.

    For anything else, the server stops at its start with an error that names what is missing.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    # Bits depend neither on the batch nor on which part of a prompt is in the radix cache.
    for known, add in (
        (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
        (
            choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            choices.add_deterministic_attention_backend_choices,
        ),
        (
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            choices.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if NAME not in known:
            add([NAME])
    if NAME not in choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        choices.add_chunked_prefix_cache_attention_backend(NAME)
    register_attention_backend(NAME)(backend)


def backend(runner: Any) -> Any:
    """Make the backend for a model runner of SGLang."""
    return pkgutil.resolve_name(MLA_BACKEND if runner.use_mla_backend else BACKEND)(runner)
