"""The dtype of attention's inputs under autocast."""

from __future__ import annotations

import torch
from torch import Tensor


def in_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, converted to autocast's dtype if autocast is on and one of q, k and v is float32,
    as torch's own attention does. Under autocast, norms and rotary embeddings return float32.
    """
    given = query, key, value
    device = query.device.type
    if torch.float32 in {x.dtype for x in given} and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return given
