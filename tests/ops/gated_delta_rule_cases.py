"""The chunked Gated Delta Net: what its tests draw. They run and compare as KDA's (`kda_cases`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import strategies as st

from . import kda_cases
from .kda_cases import DECAYS as DECAYS
from .kda_cases import PACKED as PACKED
from .kda_cases import PLAIN as PLAIN
from .kda_cases import Kind

SMALL = replace(kda_cases.SMALL, gate="softplus")  # float16, K = V = 64
WIDE_V = replace(kda_cases.WIDE_V, gate="none", dt_bias=False)

SOME = [PLAIN, PACKED, DECAYS, SMALL, WIDE_V]


@dataclass(frozen=True)
class Case(kda_cases.Case):
    """A case of KDA's, with the gate of each head's first channel."""

    def arguments(self, device: str) -> dict[str, Any]:
        """Arguments of chunk_gated_delta_rule; tokens of no sequence hold NaN."""
        args = super().arguments(device)
        args["g"] = args["g"][..., 0]
        if self.layout == "contiguous":
            args["g"] = args["g"].contiguous()
        if "dt_bias" in args:
            args["dt_bias"] = args["dt_bias"].view(self.heads_v, -1)[:, 0].contiguous()
        return args


@st.composite
def cases(draw: st.DrawFn, device: str, of: Sequence[Kind] = SOME) -> Case:
    case = draw(kda_cases.cases(device, of))
    return Case(**{field.name: getattr(case, field.name) for field in fields(case)})
