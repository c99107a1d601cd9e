"""vLLM: `--attention-backend CUSTOM`.

vLLM loads `register` as a plugin (`vllm.general_plugins`) in each of its processes, if this package
is installed beside vLLM. The backend itself is in `vllm_backend`, which vLLM imports once a user
chooses the backend.
"""

from __future__ import annotations

import logging

__all__ = ["register"]

BACKEND = "cute_attn.integrations.vllm_backend.CuteAttnBackend"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register this package's attention as vLLM's `AttentionBackendEnum.CUSTOM`.

    vLLM uses the backend only on request: `vllm serve MODEL --attention-backend CUSTOM`. If another
    plugin has already registered a CUSTOM backend, the other backend stays, with a warning.

    The backend serves decoder layers with head_dim 64, 128 or 256 on Hopper and 256 on Blackwell,
    in bfloat16 or float16, with a KV cache of the same dtype in blocks of any multiple of 16
    tokens: prefill, chunked prefill and decode in one call, sliding windows, softcap, sinks, GQA,
    and CUDA graphs of any batch. vLLM refuses the backend, and names what is missing, for quantised
    KV caches, ALiBi, MLA, encoders, cross-attention, decode context parallelism and bidirectional
    parts of a prompt.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        logger.warning(
            "vLLM's CUSTOM attention backend is %s already: cute_attn leaves it", custom.get_path()
        )
        return
    register_backend(custom, BACKEND)
