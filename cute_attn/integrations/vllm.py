"""vLLM: `--attention-backend CUTE_ATTN`, in older releases `--attention-backend CUSTOM`, and
`--attention-backend CUTE_ATTN_MLA` for models with latent attention.

vLLM loads `register` as a plugin (`vllm.general_plugins`) in each of its processes, if this package
is installed beside vLLM. The backends themselves are in `vllm_backend` and `vllm_mla_backend`,
which vLLM imports once a user chooses a backend.
"""

from __future__ import annotations

import logging
from typing import Any

from ..settings import settings

__all__ = ["register", "register_attention", "register_latent_attention"]

NAME = "CUTE_ATTN"
MLA_NAME = "CUTE_ATTN_MLA"
BACKEND = "cute_attn.integrations.vllm_backend.CuteAttnBackend"
MLA_BACKEND = "cute_attn.integrations.vllm_mla_backend.CuteAttnMLABackend"
MLA_PREFILL = "cute_attn.integrations.vllm_mla_backend.CuteAttnMLAPrefill"

logger = logging.getLogger(__name__)


class BackendPath(str):
    """The value of a member of an enumeration of vLLM's backends.

    vLLM hands its configuration to a process that it spawns before the process loads plugins. So
    the unpickled value makes the members that the configuration then looks up.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled, (str(self),)


def unpickled(path: str) -> BackendPath:
    register_attention()
    register_latent_attention()
    return BackendPath(path)


def register() -> None:
    """Register this package with vLLM: its attention, and on request linear layers.

    `CUTE_ATTN_SERVER_KDA=1` in the environment asks for KDA (`vllm_kda.register`), and
    `CUTE_ATTN_SERVER_GDN=1` for the Gated Delta Net (`vllm_gated_delta_rule.register`).
    """
    register_attention()
    register_latent_attention()
    if settings().server_kda:
        from . import vllm_kda

        vllm_kda.register()
    if settings().server_gdn:
        from . import vllm_gated_delta_rule

        vllm_gated_delta_rule.register()


def register_attention() -> None:
    """Register this package's attention as vLLM's backends CUTE_ATTN and CUSTOM.

    vLLM uses the backend only on request: `vllm serve MODEL --attention-backend CUTE_ATTN`. Older
    releases of vLLM have no names but their own, of which CUSTOM is the one for plugins. If another
    plugin has already registered a CUSTOM backend, the other backend stays, with a warning.

    The backend serves decoder layers with head_dim 64, 128 or 256 on Hopper and 256 on Blackwell,
    in bfloat16 or float16, with a KV cache of the same dtype in blocks of any multiple of 16
    tokens: prefill, chunked prefill and decode in one call, sliding windows, softcap, sinks, GQA,
    and CUDA graphs of any batch. With decode context parallelism (`-dcp`, vLLM 0.33), layers
    without a window have a cache that is split between ranks. vLLM refuses the backend, and names
    what is missing, for quantised KV caches, ALiBi, MLA, encoders, cross-attention and
    bidirectional parts of a prompt.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    takes_names = hasattr(AttentionBackendEnum, "register")
    if takes_names and NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, BackendPath(BACKEND))
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        logger.warning(
            "vLLM's CUSTOM attention backend is %s already: cute_attn leaves it%s",
            custom.get_path(),
            f" and is {NAME} only" if takes_names else "",
        )
        return
    register_backend(custom, BACKEND)


def register_latent_attention() -> None:
    """Register this package's latent attention (MLA) as vLLM's backend CUTE_ATTN_MLA, and its
    prefill as the MLA prefill backend CUTE_ATTN.

    vLLM uses the backend only on request: `vllm serve MODEL --attention-backend CUTE_ATTN_MLA`.
    Prompts then run on this package's kernels too, unless `mla_prefill_backend` names another
    backend. In older releases of vLLM, plugins cannot add MLA backends, and this function adds
    nothing.

    The backend serves decoder layers on Hopper, in bfloat16 or float16, with a latent cache of the
    same dtype. Blocks have any multiple of 16 tokens. A cached token has 576 columns with a latent
    vector of 512, 512 with 512, or 320 with 256. Prefill needs a kernel for the expanded heads,
    such as 192 with values of 128. The backend serves prefill, chunked prefill, prefix caching,
    decode, up to 15 draft tokens of a request, decode context parallelism (`-dcp`), and CUDA graphs
    of decode and verification. vLLM or the backend refuses, and names what is missing, for
    quantised caches, sparse attention (DeepSeek V3.2) and sliding windows.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    try:
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )
    except ImportError:  # an older release
        return
    for members, name, add, path in (
        (AttentionBackendEnum, MLA_NAME, register_backend, MLA_BACKEND),
        (MLAPrefillBackendEnum, NAME, register_mla_prefill_backend, MLA_PREFILL),
    ):
        if name not in members.__members__:
            add(name, BackendPath(path))
