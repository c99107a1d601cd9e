"""SGLang's scheduler in this process, a step at a time; `sglang_emulated.install` goes before."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import zmq
from sglang.srt.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)
from sglang.srt.eplb.expert_location import set_global_expert_location_metadata
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from cute_attn.integrations import sglang_backend, sglang_mla_backend

# Nobody reads what a scheduler sends to other processes, for which its context would wait.
zmq.Context.__del__ = lambda self: None


def buffers_of(pool: Any) -> list[Tensor]:
    """Keys and values of all layers, or latent vectors with rotated keys."""
    if hasattr(pool, "kv_buffer"):
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]


@dataclass
class Row:
    """A row of logits that a step of the given mode computed, and the tokens before it."""

    mode: str
    tokens: list[int]
    logits: Tensor


class Server:
    """A scheduler with its model and pools. One exists at a time: SGLang keeps state per process.

    Unused slots of the pools hold NaN, except in page 0, which SGLang keeps for padding.

    Attributes:
        rows: what the model computed so far.
        modes: the mode of each step so far.
        batches: the ForwardBatch of each step so far.
        after_step: is called after each step of the model, with the step's ForwardBatch and rows.
    """

    def __init__(self, model: Path, backend: str = "cute_attn", **options: Any) -> None:
        arguments = {
            "attention_backend": backend,
            "device": "cpu",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "log_level": "error",
            "max_mamba_cache_size": 32,  # or states of linear layers take most of the memory
            "max_running_requests": 8,
            "max_total_tokens": 2048,
            "page_size": 16,
            "random_seed": 0,
            "skip_tokenizer_init": True,
        }
        args = ServerArgs(model_path=str(model), **arguments | options)
        args.resolve_once()
        args.check_server_args()
        ports = PortArgs.init_new(args)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        try:
            self.scheduler = Scheduler(args, ports)
        except BaseException:
            self.close()
            raise
        self.runner = self.scheduler.tp_worker.model_runner
        self.backend = self.runner.attn_backend
        self.rows: list[Row] = []
        self.modes: list[str] = []
        self.batches: list[Any] = []
        self.running: list[Any] = []
        self.sent = 0
        self.after_step: Callable[[Any, list[Row]], None] = lambda batch, rows: None
        self.forward = self.runner.forward
        self.runner.forward = self.observed
        self.fill(torch.nan)

    def fill(self, value: float, first_slot: int = 16) -> None:
        """Fill the pools' slots from first_slot on."""
        pool = self.runner.token_to_kv_pool
        full = getattr(pool, "full_kv_pool", pool)
        for part in (full, getattr(pool, "swa_kv_pool", full)):
            for buffer in buffers_of(part):
                buffer[first_slot:] = value

    def close(self) -> None:
        set_global_expert_location_metadata(None, allow_overwrite=True)
        destroy_model_parallel()
        destroy_distributed_environment()

    def send(self, prompt: list[int], new_tokens: int) -> Any:
        """Queue a request, of which the model generates `new_tokens` tokens."""
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        sampling.normalize(None)
        self.sent += 1
        request = TokenizedGenerateReqInput(
            rid=str(self.sent),
            input_text=None,
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        self.scheduler.process_input_requests([request])
        (req,) = (x for x in self.scheduler.waiting_queue if x.rid == request.rid)
        return req

    @torch.inference_mode()
    def step(self) -> bool:
        """One round of the scheduler's loop; whether there was something to run."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            self.running = list(batch.reqs)
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        return batch is not None

    def run(self) -> None:
        """Run until every request has its tokens."""
        while self.step():
            pass

    def observed(self, forward_batch: Any, *rest: Any, **named: Any) -> Any:
        """The model runner's `forward`, which notes what the model computes."""
        mode = forward_batch.forward_mode  # the runner changes MIXED to EXTEND
        output = self.forward(forward_batch, *rest, **named)
        self.modes.append(mode.name)
        self.batches.append(copy.copy(forward_batch))
        logits = output.logits_output.next_token_logits.float().clone()
        rows = self.rows_of(forward_batch, mode, logits)
        self.rows += rows
        self.after_step(forward_batch, rows)
        return output

    def rows_of(self, batch: Any, mode: ForwardMode, logits: Tensor) -> list[Row]:
        """Logits with their tokens. Of a verification, each draft token has a row."""
        rows = []
        drafts = len(logits) // len(self.running) if mode.is_target_verify() else 0
        for i, (req, length) in enumerate(zip(self.running, batch.seq_lens.tolist(), strict=True)):
            tokens = [*req.origin_input_ids, *req.output_ids][:length]
            if not drafts:
                rows.append(Row(mode.name, tokens, logits[i]))
                continue
            at = slice(i * drafts, (i + 1) * drafts)
            draft, places = batch.input_ids[at].tolist(), batch.positions[at].tolist()
            paths = self.paths(batch, i, drafts)
            for j, (place, path) in enumerate(zip(places, paths, strict=True)):
                if place == length + len(path) - 1:  # other rows fill up the request's drafts
                    seen = [draft[node] for node in path]
                    rows.append(Row(mode.name, tokens + seen, logits[i * drafts + j]))
        return rows

    def paths(self, batch: Any, number: int, drafts: int) -> list[list[int]]:
        """For each draft of a request, the draft's ancestors and the draft: all drafts before it in
        a chain, in a tree by SGLang's mask, which has the drafts alone on a CPU."""
        if (self.runner.server_args.speculative_eagle_topk or 0) <= 1:
            return [list(range(j + 1)) for j in range(drafts)]
        of_drafts = batch.spec_info.custom_mask.view(-1, drafts, drafts)[number].bool()
        return [row[: j + 1].nonzero().flatten().tolist() for j, row in enumerate(of_drafts)]


class Recorder(TorchDispatchMode):
    """Records what a step computes on tensors, as a CUDA graph does, and repeats it.

    A repetition has the same tensors, and the same numbers of the host, as the recorded step. Our
    operators, and the writes to a pool of latent vectors by a Triton kernel, are recorded as calls.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        owners = [*OPERATORS]
        if hasattr(pool, "set_mla_kv_buffer"):
            owners.append((pool, "set_mla_kv_buffer"))
        self.operators = [(owner, name, getattr(owner, name)) for owner, name in owners]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "a step reads a tensor"
        made = func(*args, **kwargs)

        def again() -> None:
            for old, new in zip(tensors(made), tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)

        self.calls.append(again)
        return made

    def __enter__(self) -> Any:
        for owner, name, operator in self.operators:
            setattr(owner, name, self.recorded(operator))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for owner, name, operator in self.operators:
            setattr(owner, name, operator)

    def recorded(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        """The operator, of which only the call is recorded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                found = operator(*args, **kwargs)
            self.calls.append(lambda: operator(*args, **kwargs))
            return found

        return call

    @torch.inference_mode()
    def repeat(self) -> None:
        for call in self.calls:
            call()


OPERATORS: tuple[tuple[Any, str], ...] = (
    (sglang_backend, "flash_attn_varlen_func"),
    (sglang_mla_backend, "flash_attn_varlen_func"),
    (sglang_mla_backend, "mla_decode"),
)


def tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [t for part in x for t in tensors(part)] if isinstance(x, tuple | list) else []


class Graph:
    """A CUDA graph of a batch, by the calls of SGLang's graph runner in the runner's order.

    Attributes:
        batch: the batch that the graph reads, of `requests` requests.
        rows: what replays computed.
    """

    # What the graph runner copies before a replay, and what it pads requests with.
    INPUTS: ClassVar[dict[str, int]] = {"input_ids": 0, "positions": 0, "out_cache_loc": 0}

    @torch.inference_mode()
    def __init__(self, server: Server, like: Any, requests: int) -> None:
        self.server = server
        self.backend = backend = server.backend
        self.rows: list[Row] = []
        self.each = len(like.input_ids) // like.batch_size
        self.batch = copy.copy(like)
        self.batch.batch_size = requests
        self.batch.seq_lens_cpu = None
        for name, pad in {**self.INPUTS, "seq_lens": 1, "req_pool_indices": 0}.items():
            size = requests * (self.each if name in self.INPUTS else 1)
            setattr(self.batch, name, torch.full((size,), pad, dtype=torch.int64))
        backend.init_cuda_graph_state(requests, requests * self.each)
        backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.recorder = Recorder(server.runner.token_to_kv_pool)
        with self.recorder, forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata_in_graph(self.batch)
            output = server.runner.model.forward(
                self.batch.input_ids, self.batch.positions, self.batch
            )
        self.logits = output.next_token_logits

    @torch.inference_mode()
    def replay(self, batch: Any, rows: list[Row]) -> None:
        """Compute a step of the captured mode again."""
        if batch.forward_mode != self.batch.forward_mode:
            return
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        for name, pad in {**self.INPUTS, "seq_lens": fill, "req_pool_indices": 0}.items():
            given = getattr(batch, name)
            getattr(self.batch, name).fill_(pad)[: len(given)] = given
        self.batch.spec_info = batch.spec_info
        self.backend.init_forward_metadata_out_graph(self.batch)
        self.recorder.repeat()
        logits = self.logits[: batch.batch_size * self.each].float().clone()
        self.rows += self.server.rows_of(batch, batch.forward_mode, logits)
