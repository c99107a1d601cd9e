"""Multi-head latent attention on GPUs other than sm_90 and sm_100, which have no kernel."""

from __future__ import annotations

from .calls import ArchCall

CALLS: dict[str, ArchCall] = {}
