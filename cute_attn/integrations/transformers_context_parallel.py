"""Models of Hugging Face transformers whose sequences are split between ranks: see
`use_context_parallel`."""

from __future__ import annotations

import functools
import inspect
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..distributed import ContextParallel, context_parallel
from ..distributed.api import LayoutOf

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SplitSequences", "use_context_parallel"]

MOST_PLANS = 64  # that a model keeps: packed batches have new lengths at each step
IGNORED = -100  # the label of a token that the loss leaves out
SOFTMAX_LAYERS = ("full_attention", "sliding_attention")
GRADIENTS = ("sum", "mean")
REGISTERED: set[str] = set()  # the names that `register` has made known to transformers
# Inputs with a number for each token, beside the input itself.
OF_TOKENS = ("position_ids", "labels", "shift_labels")
# What a call may not have, because its result would not be what one process computes.
REFUSED = {
    "cache": "has no cache over ranks",
    "past_key_values": "has no cache over ranks",
    "use_cache": "has no cache over ranks",
    "output_router_logits": "computes no loss of a router, which would be over own tokens only",
    "output_attentions": "keeps no attention weights",
    "cp": "makes the plan itself",
}


class SplitSequences:
    """What `use_context_parallel` has changed, until `close()` or the end of a `with` block.

    Attributes:
        plan: the plan of the last call. `plan.unshard(logits, 1)` gives all tokens' logits.
    """

    plan: ContextParallel | None = None

    def __init__(
        self, model: Any, group: Any, layout: LayoutOf, mode: str | None, gradients: str
    ) -> None:
        self.group, self.layout, self.mode, self.gradients = group, layout, mode, gradients
        self._model = model
        self._names = list(inspect.signature(model.forward).parameters)
        # All ranks see the same lengths, so all ranks forget the same plans.
        self._plan_of = functools.lru_cache(maxsize=MOST_PLANS)(self._new_plan)
        self._has_loss = False
        self._hooks = [
            model.register_forward_pre_hook(self._split, with_kwargs=True),
            model.register_forward_hook(self._sum),
        ]

    def close(self) -> None:
        """Make the model compute on whole sequences again."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_plan(self, lengths: tuple[int, ...], packed: bool) -> ContextParallel:
        """A plan for sequences of these lengths, which compares the lengths of all ranks."""
        given: dict[str, Any] = {"seqlen": lengths[0]}
        if packed:
            given = {"cu_seqlens": [0, *accumulate(lengths)]}
        plan = context_parallel(self.group, layout=self.layout, mode=self.mode, **given)
        for rank in range(plan.world):
            if plan.layout.tokens(rank) == 0:  # all ranks raise, so no rank waits
                raise ValueError(
                    f"use_context_parallel gives rank {rank} of {plan.world} none of the "
                    f"{plan.layout.total} tokens, and models of transformers take no empty sequence"
                )
        return plan

    def _split(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """The rank's part of a call's arguments."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        for name, why in REFUSED.items():
            if given.get(name) not in (None, False):
                raise NotImplementedError(f"use_context_parallel {why}: {name} is given")
        named = [name for name in ("input_ids", "inputs_embeds") if given.get(name) is not None]
        if len(named) != 1:
            raise ValueError(
                "use_context_parallel needs input_ids or inputs_embeds, and got "
                + (" and ".join(named) or "neither")
            )
        tokens = given[named[0]]
        self._check(given, tokens)
        lengths = _packed_lengths(given, tokens)
        packed = lengths is not None
        plan = self.plan = self._plan_of(lengths or (tokens.shape[1],), packed)
        self._has_loss = given.get("labels") is not None
        if self._has_loss:
            _shift(given)
        if given.get("position_ids") is None:
            given["position_ids"] = plan.position_ids(tokens.device)[None]
        else:
            given["position_ids"] = plan.shard(given["position_ids"], 1)
        for name in (named[0], "labels", "shift_labels"):
            if given.get(name) is not None:
                given[name] = plan.shard(given[name], 1)
        return (), given | {"cp": plan, "use_cache": False}

    def _check(self, given: dict[str, Any], tokens: Tensor) -> None:
        shape = tuple(tokens.shape[:2])
        for name in OF_TOKENS:
            x = given.get(name)
            if x is not None and (x.dim() != 2 or x.shape[1] != shape[1]):
                raise ValueError(
                    f"{name} has shape {list(x.shape)}, must be [batch, {shape[1]}]: every rank "
                    "passes all tokens"
                )
        mask = given.pop("attention_mask", None)
        if mask is not None and (mask.dim() != 2 or not bool(mask.all())):
            raise NotImplementedError(
                "use_context_parallel has no padding: attention_mask is given, and is not 1 at all "
                "tokens"
            )
        keep = given.get("logits_to_keep")
        if isinstance(keep, Tensor) or keep:
            raise NotImplementedError(
                "use_context_parallel computes the logits of all own tokens: logits_to_keep is "
                f"{keep}"
            )

    def _sum(self, model: Any, args: Any, output: Any) -> Any:
        """Put the loss of all ranks' tokens in the place of the loss of the rank's tokens."""
        if not self._has_loss:
            return output
        assert self.plan is not None
        own = output[0] if isinstance(output, tuple) else output["loss"]
        if self.gradients == "mean":
            total, own = own.detach().clone(), own * self.plan.world
        else:
            total = own.detach().clone()
        dist.all_reduce(total, group=self.plan.all_ranks)
        loss = own + (total - own.detach())  # the whole loss, with the gradient of the own part
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output["loss"] = loss
        return output


def _shift(given: dict[str, Any]) -> None:
    """Labels of the next tokens, and their number, from all labels. A rank could not shift its own
    labels, because the next token may be on another rank."""
    if given.get("shift_labels") is None:
        given["shift_labels"] = pad(given["labels"][:, 1:], (0, 1), value=IGNORED)
    if given.get("num_items_in_batch") is None:
        given["num_items_in_batch"] = (given["shift_labels"] != IGNORED).sum()


def _packed_lengths(given: dict[str, Any], tokens: Tensor) -> tuple[int, ...] | None:
    """The lengths of packed sequences, or None. transformers' arguments for packed sequences are
    taken out of `given`, because the plan has the lengths."""
    offsets = given.pop("cu_seq_lens_q", None)
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"):
        given.pop(name, None)
    positions = given.get("position_ids")
    starts = [0, tokens.shape[1]]
    if offsets is not None:
        starts = offsets.tolist()
    elif positions is not None:
        follows = positions[:, 1:] == positions[:, :-1] + 1
        if not bool(follows.all()):
            firsts = (~follows).nonzero()[:, 1] + 1
            starts = sorted({0, *firsts.tolist(), tokens.shape[1]})
    if len(starts) <= 2:
        return None
    if tokens.shape[0] != 1:
        raise NotImplementedError(
            f"use_context_parallel takes packed sequences in a batch of one row, got a batch of "
            f"{tokens.shape[0]}"
        )
    return tuple(b - a for a, b in pairwise(starts))


def use_context_parallel(
    model: Any,
    group: Any = None,
    *,
    layout: LayoutOf = "zigzag",
    mode: str | None = None,
    gradients: str = "sum",
) -> SplitSequences:
    """Split the sequences of all calls of a model between the ranks of a group.

        register()
        mesh = init_device_mesh("cuda", (replicas, 8), mesh_dim_names=("data", "tokens"))
        use_context_parallel(model, mesh["tokens"])
        model(input_ids=ids, labels=ids).loss.backward()

    Each rank of the group passes all tokens of the same sequences. Hooks of the model then make a
    plan once for each length, and take the rank's tokens of the inputs, positions and labels. The
    labels are shifted beforehand, so that the last token of a range has its label too. The loss of
    the result is the mean over all ranks' labels, on every rank. All other results, such as logits,
    are of the rank's tokens.

    A batch of one row may hold packed sequences, with `position_ids` that start again, or with
    `cu_seq_lens_q`. The host reads these once in each call.

    A loss has the gradient of the rank's tokens. So parameters' gradients are added up over the
    ranks of the group, or averaged, as DistributedDataParallel and FSDP do.

    Args:
        model: a model of transformers with `attn_implementation="cute_attn"`, whose layers all have
            softmax attention, such as Llama, Qwen3, Mistral or Gemma.
        group: a process group, a DeviceMesh or a dimension of one; as for `context_parallel`.
        layout: as for `context_parallel`. A list of ranges fits sequences of one length only.
        mode: as for `context_parallel`.
        gradients: how the caller puts the ranks' gradients together: "sum", or "mean", for which
            every loss is multiplied by the number of ranks in the backward.

    Returns:
        What has changed: its `plan` is the plan of the last call, and its `close()` or the end of a
        `with` block brings the model back.

    Raises:
        ValueError: gradients has another value, or later an input has a wrong shape, or too few
            tokens for all ranks.
        NotImplementedError: the model has layers without softmax attention, or another
            `attn_implementation`; or later a call has padding, a cache, a router's loss, attention
            weights, or `logits_to_keep`.
    """
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients is {gradients!r}, must be one of {GRADIENTS}")
    config = model.config.get_text_config()
    name = config._attn_implementation
    if name not in REGISTERED:
        raise NotImplementedError(
            f"use_context_parallel needs a model with attn_implementation='cute_attn', after "
            f"register(); it is {name!r}"
        )
    others = sorted({*(getattr(config, "layer_types", None) or ())} - {*SOFTMAX_LAYERS})
    if others:
        raise NotImplementedError(
            f"use_context_parallel has softmax attention only ({', '.join(SOFTMAX_LAYERS)}), and "
            f"the model has layers of type {', '.join(others)}"
        )
    if getattr(config, "output_router_logits", False):
        raise NotImplementedError(
            f"use_context_parallel {REFUSED['output_router_logits']}: output_router_logits is True "
            "in the model's config"
        )
    return SplitSequences(model, group, layout, mode, gradients)
