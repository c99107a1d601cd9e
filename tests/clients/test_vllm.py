"""Our attention backend in vLLM's real engine, emulated for an H100."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from . import unpack, vllm_emulated


@pytest.fixture(scope="session")
def vllm() -> Any:
    vllm_emulated.install()
    import vllm

    return vllm


@pytest.mark.clients("The plugin is loaded")
def test_the_plugin_is_loaded(vllm: Any):
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert version("vllm") == unpack.version("vllm")
    load_general_plugins()
    backend = AttentionBackendEnum.CUSTOM.get_class()
    assert backend.full_cls_name() == (
        "cute_attn.integrations.vllm_backend",
        "CuteAttnBackend",
    )
