"""The hooks of `use_context_parallel`, for a model without attention, one rank after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from cute_attn.distributed import api
from cute_attn.integrations.transformers_context_parallel import IGNORED, SplitSequences

VOCABULARY, TOKENS = 11, 13


class Model(torch.nn.Module):
    """Logits of each token and its position, and the loss as transformers computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64))
        self.got: dict[str, Any] = {}

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None,
        position_ids: Tensor | None = None, **got: Any,
    ) -> dict[str, Any]:  # fmt: skip
        assert input_ids is not None and position_ids is not None
        self.got = got | {"position_ids": position_ids, "input_ids": input_ids}
        logits = self.table[input_ids] * (1 + position_ids)[..., None].cos()
        if labels is None:
            return {"logits": logits}
        shifted = got.get("shift_labels")
        if shifted is None:
            shifted = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        reduction = "mean" if got.get("num_items_in_batch") is None else "sum"
        loss = functional.cross_entropy(
            logits.flatten(0, 1), shifted.flatten(), ignore_index=IGNORED, reduction=reduction
        )
        return {"loss": loss / got.get("num_items_in_batch", 1), "logits": logits}


@contextmanager
def rank_of(rank: int, world: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a rank of a group whose messages do nothing."""
    monkeypatch.setattr(api, "compare", lambda *_: None)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


PACKED = torch.tensor([[*range(5), *range(1), *range(7)]])


@pytest.mark.parametrize("gradients", ["sum", "mean"])
@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"position_ids": PACKED},
        {"cu_seq_lens_q": torch.tensor([0, 5, 6, 13]), "max_length_q": 7, "position_ids": PACKED},
        {"attention_mask": torch.ones(1, TOKENS), "use_cache": False},
    ],
    ids=["one sequence", "packed by positions", "packed by offsets", "a mask of ones"],
)
def test_losses_and_gradients_of_ranks_add_up(
    inputs: dict[str, Any], gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, world = Model(), 2
    ids = torch.randint(VOCABULARY, (1, TOKENS))
    labels = ids.clone()
    labels[0, 3:6] = IGNORED
    positions = inputs.get("position_ids", torch.arange(TOKENS)[None])
    expected = model(ids, labels, positions)
    expected["loss"].backward()
    whole, model.table.grad = model.table.grad, None
    total, seen = torch.zeros((), dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    for rank in range(world):
        with rank_of(rank, world, monkeypatch):
            with SplitSequences(model, None, "zigzag", None, gradients) as split:
                found = model(ids, labels=labels, **inputs)
                assert split.plan is not None and split.plan.rank == rank
                assert split.plan.packed == ("position_ids" in inputs)
                assert model.got["cp"] is split.plan and model.got["use_cache"] is False
                assert not {"attention_mask", "cu_seq_lens_q", "max_length_q"} & {*model.got}
                assert torch.equal(
                    found["logits"], split.plan.shard(expected["logits"], 1)
                )  # of own tokens
            found["loss"].backward()
            total += found["loss"].detach()
            seen = torch.cat([seen, model.got["input_ids"][0]])
    factor = world if gradients == "mean" else 1
    assert model.table.grad is not None and whole is not None
    torch.testing.assert_close(model.table.grad, whole * factor)
    torch.testing.assert_close(total, expected["loss"].detach())
    assert torch.equal(seen.sort().values, ids[0].sort().values)
    assert torch.equal(model(ids, labels, positions)["loss"], expected["loss"])  # as before


def test_a_loss_is_of_all_ranks_and_has_the_gradient_of_own_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: x.add_(100.0))  # the other rank's
    model, ids = Model(), torch.arange(10)[None]
    with rank_of(1, 2, monkeypatch), SplitSequences(model, None, "contiguous", None, "mean"):
        found = model(input_ids=ids, labels=ids)["loss"]
        assert found.item() > 100.0
        (gradient,) = torch.autograd.grad(found, [model.table])
        assert not gradient[:5].any() and gradient[5:9].all()
        assert set(model(ids)) == {"logits"}  # without labels there is no loss


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "needs input_ids or inputs_embeds, and got neither"),
        ({"use_cache": True}, NotImplementedError, "no cache over ranks: use_cache is given"),
        ({"past_key_values": ()}, NotImplementedError, "past_key_values is given"),
        ({"cp": "plan"}, NotImplementedError, "makes the plan itself: cp is given"),
        ({"output_router_logits": True}, NotImplementedError, "no loss of a router"),
        ({"attention_mask": torch.eye(6)[:1]}, NotImplementedError, "no padding: attention_mask"),
        ({"logits_to_keep": 1}, NotImplementedError, "logits_to_keep is 1"),
        ({"labels": torch.zeros(1, 3)}, ValueError, r"labels has shape \[1, 3\], must be"),
        (
            {"input_ids": torch.zeros(1, 1, dtype=torch.int64)},
            ValueError,
            "gives rank 1 of 2 none of the 1 tokens",
        ),
        (
            {"input_ids": torch.zeros(2, 6), "position_ids": torch.arange(6)[None] % 3},
            NotImplementedError,
            "packed sequences in a batch of one row, got a batch of 2",
        ),
    ],
    ids=str,
)
def test_calls_that_are_refused(
    given: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    inputs = {"input_ids": torch.zeros(1, 6, dtype=torch.int64)} if given else {}
    split = SplitSequences(model, None, "zigzag", None, "sum")
    with rank_of(0, 2, monkeypatch), split, pytest.raises(error, match=message):
        model(**inputs | given)
    assert not model.got
