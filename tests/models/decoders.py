"""A decoder small enough for fp64, and batches for it on virtual ranks and dense."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.decoder import Decoder
from torch import Tensor

from dense import dense_attention
from dyncp import (
    AttentionShape,
    Batch,
    DCPAttn,
    DCPExecutor,
    PlannerConfig,
    Step,
    Topology,
    make_local_data,
    plan_batch,
)

SHAPE, VOCABULARY = AttentionShape(q_heads=4, kv_heads=2, head_dim=8, dtype="fp64"), 31


def new_decoder() -> Decoder:
    torch.manual_seed(3)
    decoder = Decoder(SHAPE, layers=2, hidden=16, ffn=24, vocab=VOCABULARY).double()
    for parameter in decoder.parameters():  # larger than for training, so that attention matters
        torch.nn.init.normal_(parameter, std=0.5)
    return decoder


def random_documents(*lengths: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(VOCABULARY, (n,), generator=draw)} for n in lengths]


def one_batch(documents: Any, mask_fn: Any, ranks: int, solver: str) -> tuple[Any, Step]:
    """Local data and step of all documents as one batch on virtual ranks, cut into many blocks."""
    batch = Batch.of([mask_fn(document) for document in documents])
    config = PlannerConfig(solver=solver, block_size=None if solver == "zigzag" else 8)
    plan = plan_batch(batch, Topology(1, ranks), planner=config)
    data = make_local_data(documents, batch, plan)
    return data, DCPExecutor(virtual_ranks=ranks).prepare(plan)


def attend_under(step: Step) -> Any:
    return partial(DCPAttn.apply, step)


def dense_attend(documents: Any, mask_fn: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention without dyncp, for concatenated whole documents."""
    batch, scale = Batch.of([mask_fn(document) for document in documents]), SHAPE.head_dim**-0.5
    return lambda q, kv: dense_attention(batch, "default", q, *kv.unbind(1), scale)
