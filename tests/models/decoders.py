"""A decoder small enough for fp64, on virtual ranks and dense."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from benchmarks.decoder import Decoder
from torch import Tensor

from dense import dense_attention
from dyncp import (
    AttentionShape,
    Batch,
    DCPAttn,
    DCPDataLoader,
    DCPExecutor,
    Plan,
    PlannerConfig,
    Step,
)
from dyncp.planner.process import PlanProcess, PlanReply, answer

SHAPE, VOCABULARY = AttentionShape(q_heads=4, kv_heads=2, head_dim=8, dtype="fp64"), 31


def new_decoder() -> Decoder:
    torch.manual_seed(3)
    decoder = Decoder(SHAPE, layers=2, hidden=16, ffn=24, vocab=VOCABULARY).double()
    for parameter in decoder.parameters():  # larger than for training: attention has to matter
        torch.nn.init.normal_(parameter, std=0.5)
    return decoder


def random_documents(*lengths: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(VOCABULARY, (n,), generator=draw)} for n in lengths]


def plan_here(_: PlanProcess, make_plan: Callable[[], Plan]) -> PlanReply:
    """What a planning process answers, without one: starting it takes a second each time."""
    reply = answer(pickle.dumps(make_plan))
    assert isinstance(reply, PlanReply), reply
    return reply


def one_batch(documents: Any, mask_fn: Any, ranks: int, solver: str) -> tuple[Any, Step]:
    """All documents as one batch on virtual ranks, cut into many blocks."""
    loader = DCPDataLoader(
        documents,
        mask_fn,
        virtual_ranks=ranks,
        tokens_per_batch=10_000,
        planner=PlannerConfig(solver=solver, block_size=None if solver == "zigzag" else 8),
    )
    with mock.patch.multiple(PlanProcess, plan=plan_here, start=lambda _: None):
        ((data, plan),) = list(loader)
    return data, DCPExecutor(virtual_ranks=ranks).prepare(plan)


def attend_under(step: Step) -> Any:
    return partial(DCPAttn.apply, step)


def dense_attend(documents: Any, mask_fn: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention without dyncp, for whole documents that follow one another."""
    batch, scale = Batch.of([mask_fn(document) for document in documents]), SHAPE.head_dim**-0.5
    return lambda q, kv: dense_attention(batch, "default", q, *kv.unbind(1), scale)
