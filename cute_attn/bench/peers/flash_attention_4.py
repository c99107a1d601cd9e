"""FlashAttention-4: its forward and backward, dense and varlen."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import Request, offsets, request

if TYPE_CHECKING:
    from .recording import Recorder

PEER = "flash_attention_4"
PACKAGE = "flash_attn"

Edits = tuple[tuple[str, str, str], ...]
"""(module, text, another text): compile this package with `text` replaced in the module's source.
The source has each text once. A request with edits has its own process: a process imports a module
once."""


def forward(
    *,
    arch: str,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    causal: bool = False,
    heads: int = 2,
    qhead_per_kvhead: int = 1,
    batch: int = 1,
    seqlen_q: int = 256,
    seqlen_k: int | None = None,
    seqlens_q: Sequence[int] | None = None,
    seqlens_k: Sequence[int] | None = None,
    dtype: str = "bfloat16",
    window: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    learnable_sink: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    lse: bool = True,
    clc: bool = False,
    two_cta: bool = True,
    page_size: int | None = None,
    num_sms: int | None = None,
) -> Request:
    """out and lse from q, k, v.

    Args:
        heads: heads of q; k and v have heads / qhead_per_kvhead heads.
        seqlens_q, seqlens_k: lengths of the sequences of a varlen batch, in place of batch,
            seqlen_q and seqlen_k. Tensors are then [total, heads, head_dim].
        dtype: dtype of q, k and v: "bfloat16", "float16", or "float8_e4m3fn" with descale factors.
        window: keys to the left and right of the diagonal that a query sees; None is all.
        num_splits: partial results along the keys, combined by a second kernel.
        clc, two_cta: the choices of the environment variables FA_CLC and FA_DISABLE_2CTA.
        page_size: rows of a page. k and v are then [pages, page_size, heads, head_dim], with the
            pages of each sequence in `page_table`.
    """
    options = _tensors(locals())
    return request(PEER, "forward", arch, num_sms, options)


def backward(
    *,
    arch: str,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    causal: bool = False,
    heads: int = 2,
    qhead_per_kvhead: int = 1,
    batch: int = 1,
    seqlen_q: int = 256,
    seqlen_k: int | None = None,
    seqlens_q: Sequence[int] | None = None,
    seqlens_k: Sequence[int] | None = None,
    dtype: str = "bfloat16",
    window: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    deterministic: bool = False,
    two_cta: bool = True,
    edits: Edits = (),
    num_sms: int | None = None,
) -> Request:
    """dq, dk and dv from q, k, v, out, dout and lse. Arguments as for `forward`.

    Calls, in order: preprocess, the main function (one kernel, or two at head_dim 256 on sm_100a),
    then one postprocess for dq and, with GQA, for dk and dv.
    """
    options = _tensors(locals())
    return request(PEER, "backward", arch, num_sms, options)


def mla_forward(
    *,
    arch: str,
    heads: int = 128,
    batch: int = 1,
    seqlen_q: int = 1,
    seqlen_k: int = 256,
    one_cta: bool = True,
    edits: Edits = (),
    num_sms: int | None = None,
) -> Request:
    """out and lse from q, qv, k and v, for multi-head latent attention with absorbed products.
    Scores are q k^T + qv v^T, of 64 and 512 dimensions; all heads share k and v.

    Args:
        one_cta: the choice of the environment variable FLASH_ATTENTION_MLA_1CTA.
    """
    options = {n: v for n, v in locals().items() if n not in ("arch", "num_sms")}
    return request(PEER, "mla_forward", arch, num_sms, options)


def page_table(batch: int, seqlen_k: int, page_size: int) -> tuple[tuple[int, ...], ...]:
    """The pages of each sequence, in order. No page comes twice, and page 0 belongs to no
    sequence."""
    pages = -(-seqlen_k // page_size)
    return tuple(
        tuple(batch * pages - (page * batch + sequence) for page in range(pages))
        for sequence in range(batch)
    )


def _tensors(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a request, checked."""
    options = {n: v for n, v in given.items() if n not in ("arch", "num_sms")}
    for name in ("seqlens_q", "seqlens_k"):
        if options[name] is not None:
            options[name] = tuple(options[name])
    q, k = options["seqlens_q"], options["seqlens_k"]
    if k is not None and (q is None or len(q) != len(k)):
        raise ValueError(f"seqlens_q is {q}, seqlens_k is {k}: not of the same sequences")
    if q is not None and options.get("page_size") is not None:
        raise ValueError("paged, and varlen: a sequence's length is then seqlen_k")
    if options["heads"] % options["qhead_per_kvhead"]:
        raise ValueError("heads is not a multiple of qhead_per_kvhead")
    return options


# -- in the capturing process ---------------------------------------------------------------------


def _interface(two_cta: bool = True, clc: bool = False, edits: Edits = ()) -> Any:
    if edits:
        sys.meta_path.insert(0, _Edited(edits))
    from flash_attn.cute import interface, utils

    # Otherwise the front end compiles without calling.
    interface.is_fake_mode = lambda: False
    utils._fa_clc_enabled = clc
    utils._fa_disable_2cta_enabled = not two_cta
    return interface


class _Edited:
    """Finds modules of the package in changed copies, which the compiler reads as well."""

    def __init__(self, edits: Edits):
        self._edits = edits
        modules = {module for module, _, _ in edits}
        if known := sorted(modules & sys.modules.keys()):
            raise RuntimeError(f"{known} are imported already: capture such a request by itself")

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        edits = [(old, new) for module, old, new in self._edits if module == name]
        found = PathFinder.find_spec(name, path) if edits else None
        if found is None or found.origin is None:
            return None
        text = Path(found.origin).read_text()
        for old, new in edits:
            if text.count(old) != 1:
                raise ValueError(f"{name} has {text.count(old)} times {old!r}")
            text = text.replace(old, new)
        # The module keeps its own name, because the names of compiled kernels contain it.
        copy = Path(tempfile.mkdtemp(prefix="edited-")) / Path(found.origin).name
        copy.write_text(text)
        return spec_from_file_location(name, copy)


class _Shapes:
    """Shapes of the tensors of a request."""

    def __init__(self, o: dict[str, Any]):
        head_dim_v = o["head_dim_v"] or o["head_dim"]
        heads_k = o["heads"] // o["qhead_per_kvhead"]
        self.varlen = o["seqlens_q"] is not None
        q: tuple[int, ...] = (o["batch"], o["seqlen_q"])
        k: tuple[int, ...] = (o["batch"], o["seqlen_k"] or o["seqlen_q"])
        self.lse: tuple[int, ...] = (o["batch"], o["heads"], o["seqlen_q"])
        if self.varlen:
            q, k = (sum(o["seqlens_q"]),), (sum(o["seqlens_k"] or o["seqlens_q"]),)
            self.lse = (o["heads"], *q)
        if o.get("page_size") is not None:
            table = page_table(o["batch"], k[1], o["page_size"])
            k = (sum(map(len, table)) + 1, o["page_size"])
        self.q = (*q, o["heads"], o["head_dim"])
        self.k = (*k, heads_k, o["head_dim"])
        self.v = (*k, heads_k, head_dim_v)
        self.out = (*q, o["heads"], head_dim_v)
        self.descale = (len(o["seqlens_q"]) if self.varlen else o["batch"], heads_k)


def _varlen(r: Recorder, o: dict[str, Any]) -> dict[str, Any]:
    if o["seqlens_q"] is None:
        return {}
    result: dict[str, Any] = {}
    for side in "qk":
        lengths = o[f"seqlens_{side}"] or o["seqlens_q"]
        starts = offsets(lengths)
        name = f"cu_seqlens_{side}"
        result[name] = r.input(name, (len(starts),), "int32", values=starts)
        result[f"max_seqlen_{side}"] = max(lengths)
    return result


def _forward(r: Recorder, **o: Any) -> None:
    interface = _interface(o["two_cta"], o["clc"])
    shapes, dtype = _Shapes(o), o["dtype"]
    fp8 = dtype.startswith("float8")
    keywords: dict[str, Any] = _varlen(r, o)
    q, k, v = (r.input(n, getattr(shapes, n), dtype) for n in "qkv")
    if fp8:
        for name in ("q_descale", "k_descale", "v_descale"):
            keywords[name] = r.input(name, shapes.descale, "float32")
    if o["page_size"] is not None:
        seqlen_k = o["seqlen_k"] or o["seqlen_q"]
        table = page_table(o["batch"], seqlen_k, o["page_size"])
        shape = (len(table), len(table[0]))
        keywords["page_table"] = r.input("page_table", shape, "int32", values=table)
        used = (seqlen_k,) * o["batch"]
        keywords["seqused_k"] = r.input("seqused_k", (o["batch"],), "int32", values=used)
    if o["learnable_sink"]:
        keywords["learnable_sink"] = r.input("learnable_sink", (o["heads"],), "bfloat16")
    if o["lse"]:
        keywords["lse"] = r.output("lse", shapes.lse, "float32")
    interface._flash_attn_fwd(
        q,
        k,
        v,
        out=r.output("out", shapes.out, "bfloat16" if fp8 else dtype),
        causal=o["causal"],
        softcap=o["softcap"],
        window_size_left=o["window"][0],
        window_size_right=o["window"][1],
        num_splits=o["num_splits"],
        pack_gqa=o["pack_gqa"],
        **keywords,
    )


def _mla_forward(r: Recorder, **o: Any) -> None:
    os.environ["FLASH_ATTENTION_MLA_1CTA"] = str(int(o["one_cta"]))
    interface = _interface(edits=o["edits"])
    q, k = (o["batch"], o["seqlen_q"], o["heads"]), (o["batch"], o["seqlen_k"], 1)
    interface._flash_attn_fwd(
        r.input("q", (*q, 64)),
        r.input("k", (*k, 64)),
        r.input("v", (*k, 512)),
        r.input("qv", (*q, 512)),
        out=r.output("out", (*q, 512)),
        lse=r.output("lse", q, "float32"),
    )


def _backward(r: Recorder, **o: Any) -> None:
    interface = _interface(o["two_cta"], edits=o["edits"])
    shapes, dtype = _Shapes(o), o["dtype"]
    keywords = _varlen(r, o)
    tensors = [
        r.input(name, getattr(shapes, shape), dtype)
        for name, shape in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "out"), ("dout", "out"))
    ]
    interface._flash_attn_bwd(
        *tensors,
        r.input("lse", shapes.lse, "float32"),
        dq=r.output("dq", shapes.q, dtype),
        dk=r.output("dk", shapes.k, dtype),
        dv=r.output("dv", shapes.v, dtype),
        causal=o["causal"],
        softcap=o["softcap"] or 0.0,
        window_size_left=o["window"][0],
        window_size_right=o["window"][1],
        deterministic=o["deterministic"],
        **keywords,
    )


FRONT_ENDS = {"forward": _forward, "backward": _backward, "mla_forward": _mla_forward}
