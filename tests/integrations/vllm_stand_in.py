"""A stand-in of the part of vLLM that an attention backend meets. It is not vLLM.

vLLM is too large to be installed for `make test`; `make test-clients` runs the real engine. This is
written from the interface that its documentation shows: the classes of `vllm.v1.attention.backend`
and `.backends.registry` (releases 0.15 to 0.26, and 0.33 for the KV cache, DCP, R-SWA and names of
backends), with the names, the order of arguments and the defaults there. `Runner` makes the calls
that a worker makes in a step, in the same order.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

# -- vllm.v1.attention.backend


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class DeviceCapability(NamedTuple):
    major: int
    minor: int


HOPPER, BLACKWELL, AMPERE = (DeviceCapability(major, 0) for major in (9, 10, 8))


class MultipleOf:
    def __init__(self, base: int):
        self.base = base


class AttentionBackend(ABC):
    accept_output_buffer = False
    forward_includes_kv_cache_update = True
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes: Sequence[str] = ("auto",)

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> Any: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> Any: ...

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]: ...

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        raise NotImplementedError

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    is_mla = supports_sink = supports_mm_prefix = is_sparse = classmethod(lambda cls: False)
    supports_batch_invariance = classmethod(lambda cls: False)

    @classmethod
    def supports_dcp(cls) -> bool:
        return bool(cls.get_impl_cls().supports_dcp)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        return None

    @classmethod
    def validate_configuration(
        cls,
        head_size: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        kv_cache_dtype: str | None = "auto",
        block_size: int | None = 16,
        use_mla: bool = False,
        has_sink: bool = False,
        use_sparse: bool = False,
        use_mm_prefix: bool = False,
        device_capability: DeviceCapability = HOPPER,
        attn_type: str = AttentionType.DECODER,
        use_dcp: bool = False,
    ) -> list[str]:
        """The reasons against the backend, in vLLM's words."""
        sizes = [getattr(x, "base", x) for x in cls.get_supported_kernel_block_sizes()]
        checks = {
            "head_size not supported": head_size in cls.get_supported_head_sizes(),
            "dtype not supported": dtype in cls.supported_dtypes,
            "kv_cache_dtype not supported": kv_cache_dtype
            in (None, *cls.supported_kv_cache_dtypes),
            "block_size not supported": block_size is None
            or any(block_size % size == 0 for size in sizes),
            "partial multimodal token full attention not supported": not use_mm_prefix
            or cls.supports_mm_prefix(),
            "MLA not supported": use_mla == cls.is_mla(),
            "sink setting not supported": not has_sink or cls.supports_sink(),
            "sparse not supported": use_sparse == cls.is_sparse(),
            "compute capability not supported": cls.supports_compute_capability(device_capability),
            f"attention type {attn_type} not supported": cls.supports_attn_type(attn_type),
            "DCP not supported": not use_dcp or cls.supports_dcp(),
        }
        reasons = [reason for reason, fine in checks.items() if not fine]
        combination = cls.supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse,
            device_capability,
        )  # fmt: skip
        return reasons if combination is None else [*reasons, combination]


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: Any = True
    rswa_prefix_lens: Tensor | None = None
    seq_lens_cpu_upper_bound: Tensor | None = None


class AttentionMetadataBuilder(ABC):
    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    supports_update_block_table = False
    supports_draft_decode_metadata_update = False

    @abstractmethod
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cls._cudagraph_support

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any: ...

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> Any:
        return self.build(0, common_attn_metadata, fast_build=True)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        raise NotImplementedError

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class AttentionImpl(ABC):
    can_return_lse_for_decode = False
    supports_dcp = False
    dcp_world_size: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        self.dcp_world_size, _ = get_dcp_world_size_and_rank()
        return self

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None: ...

    @abstractmethod
    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor: ...

    # Of backends whose forward does not write to the cache; abstract in none.
    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        raise NotImplementedError


# -- decode context parallelism: vllm.distributed.parallel_state and vllm.v1.attention.ops


class ThreadGroup:
    """A group whose ranks are threads of this process."""

    def __init__(self, world: int) -> None:
        self.world_size = world
        self.barrier = threading.Barrier(world, timeout=60)
        self.given: list[Any] = [None] * world

    @property
    def rank_in_group(self) -> int:
        rank: int = _of_thread.rank
        return rank

    def _all(self, x: Tensor) -> list[Tensor]:
        self.given[self.rank_in_group] = x
        self.barrier.wait()
        found = [x.clone() for x in self.given]
        self.barrier.wait()
        return found

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        assert x.is_contiguous()
        return torch.cat(self._all(x), dim)

    def reduce_scatter(self, x: Tensor, dim: int = -1) -> Tensor:
        total = torch.stack(self._all(x)).sum(0)
        return total.chunk(self.world_size, dim)[self.rank_in_group].contiguous()

    def run(self, work: Any) -> list[Any]:
        """What a function of the rank returns, of all ranks at once."""
        found: list[Any] = [None] * self.world_size

        def of_rank(rank: int) -> None:
            _of_thread.group, _of_thread.rank = self, rank
            try:
                found[rank] = work(rank)
            except BaseException as error:
                found[rank] = error
                self.barrier.abort()

        threads = [
            threading.Thread(target=of_rank, args=(rank,)) for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [x for x in found if isinstance(x, BaseException)]
        for error in sorted(errors, key=lambda x: isinstance(x, threading.BrokenBarrierError)):
            raise error
        return found


_of_thread = threading.local()


def get_dcp_group() -> ThreadGroup:
    group: ThreadGroup = _of_thread.group
    return group


def get_dcp_world_size_and_rank(enabled: bool = True) -> tuple[int, int]:
    group = getattr(_of_thread, "group", None)
    return (1, 0) if group is None or not enabled else (group.world_size, group.rank_in_group)


def get_dcp_local_seq_lens(
    seq_lens: Tensor, dcp_size: int = 1, dcp_rank: int = 0, cp_kv_cache_interleave_size: int = 1
) -> Tensor:
    """How many of a sequence's tokens a rank has, counted one by one."""
    step = cp_kv_cache_interleave_size
    counts = [
        sum(i // step % dcp_size == dcp_rank for i in range(int(length))) for length in seq_lens
    ]
    return torch.tensor(counts, dtype=torch.int32, device=seq_lens.device)


def cp_lse_ag_out_rs(
    cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: ThreadGroup, return_lse: bool = False
) -> Any:
    """Tensors `[tokens, heads, head_size]` and `[tokens, heads]` of all heads; own heads back."""
    lses = torch.stack(cp_group.all_gather(cp_attn_lse[None].contiguous(), 0).unbind(0))
    total = lses.logsumexp(0)
    weight = (cp_attn_lse - total).exp().nan_to_num(0.0)
    scaled = (cp_attn_out.float() * weight[..., None]).to(cp_attn_out.dtype)
    out = cp_group.reduce_scatter(scaled.contiguous(), dim=1)
    own = total.chunk(cp_group.world_size, 1)[cp_group.rank_in_group]
    return (out, own) if return_lse else out


def merge_attn_states(
    output: Tensor, prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor,
    suffix_lse: Tensor,
) -> None:  # fmt: skip
    """Outputs are `[tokens, heads, head_size]`, and lse is `[heads, tokens]`."""
    assert prefix_output.shape == output.shape and prefix_lse.shape == suffix_lse.shape
    weights = torch.stack([prefix_lse, suffix_lse]).softmax(0).nan_to_num(0.0).mT[..., None]
    output.copy_(weights[0] * prefix_output.float() + weights[1] * suffix_output.float())


def declared(bases: Mapping[str, type]) -> list[tuple[str, str, list[inspect.Parameter]]]:
    """(name, method, parameters) of all that the base classes declare."""
    return [
        (name, method, list(inspect.signature(function).parameters.values()))
        for name, cls in bases.items()
        for method in vars(cls)
        if (not method.startswith("_") or method == "__init__")
        and callable(function := getattr(cls, method))
    ]


def assert_takes(backend: Any, bases: Mapping[str, type]) -> int:
    """Check that the backend's methods take the arguments that the base classes "backend",
    "builder" and "impl" declare, positionally and by name. Returns how many methods there are."""
    classes = {
        "backend": backend,
        "builder": backend.get_builder_cls(),
        "impl": backend.get_impl_cls(),
    }
    methods = declared(bases)
    for cls, method, parameters in methods:
        ours = inspect.signature(getattr(classes[cls], method))
        names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        required = [x.name for x in parameters if x.default is x.empty and x.name in names]
        ours.bind(*names)
        ours.bind(*required)
        if not any(x.kind is x.VAR_POSITIONAL for x in ours.parameters.values()):
            ours.bind(**dict.fromkeys(names))
    return len(methods)


BASES = {
    "backend": AttentionBackend,
    "builder": AttentionMetadataBuilder,
    "impl": AttentionImpl,
}


# -- vllm.v1.attention.backends.registry


def installed(monkeypatch: pytest.MonkeyPatch, *, takes_names: bool = True) -> Any:
    """Puts the stand-in where vLLM would be; returns the registry, which takes names of new
    backends as in release 0.33, or not as in older releases."""
    overrides: dict[Any, str] = {}

    class AttentionBackendEnum(Enum):
        FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
        CUSTOM = None

        def get_path(self) -> str:
            path = overrides.get(self, self.value)
            if not path:
                raise ValueError(f"Backend {self.name} must be registered before use.")
            return path

        def get_class(self) -> Any:
            module, _, name = self.get_path().rpartition(".")
            return getattr(importlib.import_module(module), name)

        def is_overridden(self) -> bool:
            return self in overrides

    def register(cls: Any, name: str, value: str) -> Any:
        if name in cls._member_map_:
            raise ValueError(f"Backend {name} already exists in {cls.__name__}.")
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        setattr(cls, name, member)
        cls._member_map_[name] = cls._value2member_map_[value] = member
        cls._member_names_.append(name)
        return member

    if takes_names:
        AttentionBackendEnum.register = classmethod(register)  # type: ignore[attr-defined]

    def register_backend(
        backend: Any, class_path: str | None = None, is_mamba: bool = False
    ) -> Any:
        assert class_path is not None and not is_mamba
        if isinstance(backend, str):
            backend = AttentionBackendEnum.register(backend, class_path)  # type: ignore[attr-defined]
        overrides[backend] = class_path
        return lambda x: x

    registry = ModuleType("vllm.v1.attention.backends.registry")
    vars(registry).update(
        AttentionBackendEnum=AttentionBackendEnum, register_backend=register_backend
    )
    backend = ModuleType("vllm.v1.attention.backend")
    vars(backend).update({x: value for x, value in globals().items() if x[0].isupper()})
    utils = ModuleType("vllm.v1.attention.backends.utils")
    vars(utils).update(
        get_kv_cache_layout=lambda: "NHD", get_dcp_local_seq_lens=get_dcp_local_seq_lens
    )
    state = ModuleType("vllm.distributed.parallel_state")
    vars(state).update(
        get_dcp_group=get_dcp_group, get_dcp_world_size_and_rank=get_dcp_world_size_and_rank
    )
    config = ModuleType("vllm.config")
    vars(config).update(get_current_vllm_config_or_none=lambda: None)
    dcp = ModuleType("vllm.v1.attention.ops.dcp")
    vars(dcp).update(cp_lse_ag_out_rs=cp_lse_ag_out_rs, dcp_a2a_lse_reduce=None)
    merge = ModuleType("vllm.v1.attention.ops.merge_attn_states")
    vars(merge).update(merge_attn_states=merge_attn_states)
    envs = ModuleType("vllm.envs")
    vars(envs).update(VLLM_BATCH_INVARIANT=False)
    packages = ("", ".v1", ".v1.attention", ".v1.attention.backends", ".v1.attention.ops")
    for name in (*(f"vllm{x}" for x in packages), "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (registry, backend, utils, envs, state, config, dcp, merge):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(sys.modules["vllm"]).update(envs=envs)
    monkeypatch.delitem(sys.modules, "cute_attn.integrations.vllm_backend", raising=False)
    return registry


# -- a worker


class Runner:
    """One attention layer and its KV cache, and the requests of a server.

    Attributes:
        keys, values: of each request so far, `[tokens, heads_k, head_size]`.
        blocks: of each request, in order.
        kv_cache: of the last of the layers, if `memory` gives the order in memory of layers,
            blocks, heads, tokens and content, as main does; else of the only one, in the backend's.
    """

    def __init__(
        self,
        backend: Any,
        *,
        heads: int,
        heads_k: int,
        head_size: int,
        block_size: int = 16,
        num_blocks: int = 64,
        most_blocks: int = 12,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        memory: tuple[int, ...] | None = None,
        kv_cache_dtype: str = "auto",
        interleave: int = 1,
        **layer: Any,
    ):
        self.heads, self.heads_k, self.head_size = heads, heads_k, head_size
        self.block_size, self.most_blocks = block_size, most_blocks
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.layer = SimpleNamespace(
            **{name: torch.ones(1, device=device) for name in ("_q_scale", "_k_scale", "_v_scale")}
        )
        fp8 = kv_cache_dtype.startswith("fp8")
        if fp8:
            self.layer._k_scale, self.layer._v_scale = (
                torch.tensor(x, device=device) for x in (0.5, 0.25)
            )
        self.impl = backend.get_impl_cls()(
            heads, head_size, head_size**-0.5, heads_k, None, layer.get("sliding_window"),
            kv_cache_dtype, layer.get("logits_soft_cap"), AttentionType.DECODER, None,
            **{name: x for name, x in layer.items() if name == "sinks"},
        )  # fmt: skip
        self.ranks, self.rank = get_dcp_world_size_and_rank()
        self.interleave = interleave
        of_vllm = SimpleNamespace(
            parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=interleave),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )
        self.builder = backend.get_builder_cls()(
            SimpleNamespace(block_size=block_size, num_kv_heads=heads_k, head_size=head_size),
            ["layer.0"], of_vllm, self.device,
        )  # fmt: skip
        # As bytes, of which the backend's shape and order make a view.
        of_layer = backend.get_kv_cache_shape(num_blocks, block_size, heads_k, head_size, "auto")
        shape = (1 if memory is None else 3, *of_layer)
        order = memory or (0, *(1 + i for i in backend.get_kv_cache_stride_order()))
        of_cache = torch.uint8 if fp8 else dtype  # as vLLM allocates it
        count = of_cache.itemsize * torch.Size(shape).numel()
        raw = torch.zeros(count, dtype=torch.int8, device=device)
        physical = raw.view(of_cache).view([shape[i] for i in order])
        self.kv_cache = physical.permute([order.index(i) for i in range(len(order))])[-1]
        assert self.kv_cache.shape == of_layer
        self.kv_cache.fill_(0x7F if fp8 else torch.nan)  # 0x7F: a NaN in both types of fp8
        self.kv_cache[0] = 0  # the null block
        self.free = (1 + torch.randperm(num_blocks - 1, generator=self.generator)).tolist()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.blocks: list[list[int]] = []

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def step(
        self, queries: dict[int, int], *, pad_rows: int = 0, pad_requests: int = 0
    ) -> tuple[list[Tensor], Tensor]:
        """Run a step of so many new tokens of each request, with padding as for a CUDA graph.

        Returns:
            (the queries of each request, the output of all rows).
        """
        tokens = sum(queries.values()) + pad_rows
        q = self.randn(tokens, self.heads, self.head_size)
        k, v = (self.randn(tokens, self.heads_k, self.head_size) for _ in range(2))
        common = self.metadata(queries, k, v, pad_rows, pad_requests)
        metadata = self.builder.build(
            common_prefix_len=0, common_attn_metadata=common, fast_build=False
        )
        output = torch.full_like(q, torch.nan)
        self.forward(metadata, q, k, v, output)
        return list(q[: sum(queries.values())].split(list(queries.values()))), output

    def forward(self, metadata: Any, q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> None:
        """As vLLM's attention layer does it."""
        with torch.inference_mode():
            self.impl.do_kv_cache_update(self.layer, k, v, self.kv_cache, metadata.slot_mapping)
            found = self.impl.forward(self.layer, q, k, v, self.kv_cache, metadata, output=output)
        assert found is output

    def slot(self, blocks: list[int], token: int) -> int:
        """A token's slot; -1 if another rank has it. A block has `ranks` times its tokens."""
        block, at = divmod(token, self.block_size * self.ranks)
        turn, at = divmod(at, self.interleave * self.ranks)
        owner, at = divmod(at, self.interleave)
        if owner != self.rank:
            return -1
        return blocks[block] * self.block_size + turn * self.interleave + at

    def metadata(
        self, queries: dict[int, int], k: Tensor, v: Tensor, pad_rows: int, pad_requests: int
    ) -> CommonAttentionMetadata:
        starts, slots, first = [0], [], 0
        for request, count in queries.items():
            while len(self.keys) <= request:
                empty = k.new_empty(0, self.heads_k, self.head_size)
                self.keys.append(empty)
                self.values.append(empty)
                self.blocks.append([])
            done = len(self.keys[request])
            rows = slice(first, first + count)
            self.keys[request] = torch.cat([self.keys[request], k[rows]])
            self.values[request] = torch.cat([self.values[request], v[rows]])
            while len(self.blocks[request]) * self.block_size * self.ranks < done + count:
                self.blocks[request].append(self.free.pop())
            slots += [self.slot(self.blocks[request], i) for i in range(done, done + count)]
            first += count
            starts.append(first)
        lengths = [len(self.keys[request]) for request in queries]
        table = torch.zeros(len(queries) + pad_requests, self.most_blocks, dtype=torch.int32)
        for row, request in enumerate(queries):
            table[row, : len(self.blocks[request])] = torch.tensor(self.blocks[request])
        starts += [first] * pad_requests
        return CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=self.device),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(
                lengths + [0] * pad_requests, dtype=torch.int32, device=self.device
            ),
            num_reqs=len(queries) + pad_requests,
            num_actual_tokens=first + pad_rows,
            max_query_len=max(queries.values()),
            max_seq_len=max(lengths),
            seq_lens_cpu_upper_bound=torch.tensor(lengths + [0] * pad_requests),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.tensor(slots + [-1] * pad_rows, device=self.device),
        )
