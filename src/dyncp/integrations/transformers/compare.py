"""The comparison of an untested model with its own attention, on virtual ranks of this process.

One long document is run with the model's loss (including auxiliary losses), and several documents
in one batch. The first document is longer than the layers' windows. The comparison changes the
weights and restores them afterwards: initial weights are often so small that attention is a plain
mean and positions have no effect.

Some code depends on numbers that no small document reaches, such as a scale of the scores that
begins at position 8192. So large numbers are lowered (thresholds.py); if that changes the model's
own results, they are compared again. And code that makes the numbers 0, 1, 2, ... of this rank's
rows, although the model was given positions, is refused whatever it does with them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dyncp
from dyncp.blocks import AttentionShape, Batch
from dyncp.executor import DCPExecutor
from dyncp.integrations import ROWS
from dyncp.integrations.transformers.functions import COEFFICIENT
from dyncp.integrations.transformers.layers import (
    layer_masks,
    needs_largest_position,
)
from dyncp.integrations.transformers.thresholds import Threshold, find_thresholds, lowered
from dyncp.masks import causal
from dyncp.plan import Layout, Plan
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.samples import make_local_data
from dyncp.topology import Topology

# Largest relative differences allowed by the comparison. Measured on the 70 architectures of
# Transformers 5.22 that run: at most 1.2e-6 in fp32, and more than 1e-2 if a layer sees only the
# rows of one rank.
TOLERANCE, TOLERANCE_16_BIT = 1e-4, 5e-2
RANKS = 2
LENGTHS = (96, 33, 5)
# Operators that only move or index rows.
INDEXING = frozenset({
    "alias", "cat", "clone", "detach", "expand", "gather", "index", "index_add", "index_copy",
    "index_put", "index_select", "lift_fresh", "permute", "repeat", "reshape", "scatter",
    "scatter_add", "select", "slice", "sort", "split", "squeeze", "stack", "t", "to_copy",
    "transpose", "unsafe_view", "unsqueeze", "view",
})  # fmt: skip
TORCH, DYNCP = (Path(package.__path__[0]) for package in (torch, dyncp))

Results = list[tuple[Tensor, Tensor | None]]  # outputs and loss of every document


def compare(model: Any, config: Any, attach: Callable[[], Any], shape: AttentionShape) -> Any:
    """The result of `attach`, after a comparison of the model before and after it. If results
    differ, detaches the model and raises ValueError."""
    with _noisy_weights(model):
        documents = _documents(model, config)
        short = [ids[: LENGTHS[0]] for ids in documents]
        try:
            expected = [_run_alone(model, ids) for ids in documents]
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be compared: with its own attention, its code "
                f"failed ({type(error).__name__}: {error})"
            ) from error
        thresholds = _beyond(model, config, short, len(documents[0]))
        attached = attach()
        try:
            with DCPExecutor(virtual_ranks=RANKS, device=model.device) as executor:
                run = Planned(attached, executor, shape)
                run.check(documents, expected)
                for threshold, results in thresholds:
                    with threshold.lowered():
                        run.check(short, results, f" beyond {threshold.name}")
        except BaseException:
            attached.detach()
            raise
    return attached


@dataclass
class Planned:
    """Runs an attached model under plans for virtual ranks. `shape` is what its loader plans."""

    attached: Any
    executor: DCPExecutor
    shape: AttentionShape

    def check(self, documents: list[Tensor], expected: Results, where: str = "") -> None:
        """Raises ValueError if outputs or losses differ from `expected`. `where` describes them."""
        found, _ = self._run(documents)
        _, loss = self._run(documents[:1])
        pairs = [("outputs", rows, own) for rows, (own, _) in zip(found, expected, strict=True)]
        own_loss = expected[0][1]
        if own_loss is not None:
            pairs.append(("losses", own_loss * nan if loss is None else loss, own_loss))
        for what, got, own in pairs:
            allowed = TOLERANCE if own.dtype in (torch.float32, torch.float64) else TOLERANCE_16_BIT
            difference = ((got - own).abs().max() / own.abs().max()).item()
            if not difference <= allowed:
                raise ValueError(
                    f"the {what} of {type(self.attached.model).__name__}{where} under dyncp differ "
                    f"from those of its own attention (relative difference {difference:.1e}; at "
                    f"most {allowed:.0e} is allowed): its layers do something that dyncp does not "
                    "support, such as taking a row's number for its position"
                )

    def _run(self, documents: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """The outputs of every document and the loss of the batch."""
        model, mask_fn = self.attached.model, self.attached.masks(causal)
        samples = [{"input_ids": ids} for ids in documents]
        batch = Batch.of([mask_fn(sample) for sample in samples], range(len(samples)))
        plan = _plan_out_of_order(batch, self.shape)
        step = self.executor.prepare(plan)
        fields = make_local_data(samples, batch, plan).items()
        data = {name: value.to(model.device) for name, value in fields}
        counted = CountedRows(step.num_rows)
        try:
            with counted:
                output = model(**data, dyncp_step=step, **_options(model))
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot run under dyncp: {_reason(error)}"
            ) from error
        if counted.place:
            raise ValueError(
                f"{type(model).__name__} computes with the numbers of a rank's rows "
                f"({counted.place}), although it was given positions: a token's row on its rank is "
                "not its position, so the results would be wrong"
            )
        return step.gather(_rows(output)), output.get("loss")


def _plan_out_of_order(batch: Batch, shape: AttentionShape) -> Plan:
    """A plan with random placement: if rows were in order, a model that counts rows as positions
    would pass."""
    layout, size = Layout(local_multiple=ROWS), max(16, batch.lengths[0] // 8)
    for seed in range(100):
        config = PlannerConfig(block_size=size, solver="random", layout=layout, seed=seed)
        plan = plan_batch(batch, Topology(1, RANKS), shape, planner=config)
        rows = np.concatenate([part.row_coordinates for part in plan.parts])
        if (np.diff(rows[rows >= 0]) < 0).any():
            return plan
    raise AssertionError("100 random placements were in order")


def _reason(error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error)
    return (
        f"its code failed ({type(error).__name__}: {error}); it may compute with its attention "
        "mask, which dyncp does not make, since masks are part of the plan"
    )


class CountedRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds code of the model that computes with the numbers n, n + 1, n + 2, ... of all rows.
    `place` says where; empty if there is none. Indexing with them, as experts do, is no computing.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.place = rows, ""
        self._numbers: list[Tensor] = []  # found so far

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **kwargs or {})
        indexes = function.overloadpacket.__name__.strip("_") in INDEXING
        if not self.place and not indexes and any(map(self._is_number, args)):
            self.place = _place_in_model()
        if isinstance(made, Tensor) and _counts(made, self.rows):
            self._numbers.append(made)
        return made

    def _is_number(self, given: Any) -> bool:
        """Whether a tensor is one of the numbers, or a view of them."""
        if not isinstance(given, Tensor):
            return False
        return any(
            given.untyped_storage().data_ptr() == found.untyped_storage().data_ptr()
            for found in self._numbers
        )


def _counts(tensor: Tensor, rows: int) -> bool:
    if tensor.numel() != rows or rows not in tensor.shape or tensor.dtype == torch.bool:
        return False
    numbers = tensor.detach().flatten()
    return bool((numbers[1:] - numbers[:-1] == 1).all())


def _place_in_model() -> str:
    """The innermost place outside torch; empty if that is in dyncp."""
    frame: Any = sys._getframe(2)
    path = Path(frame.f_code.co_filename)
    while path.is_relative_to(TORCH):
        frame = frame.f_back
        path = Path(frame.f_code.co_filename)
    if path.is_relative_to(DYNCP):
        return ""
    return f"{path.name}, line {frame.f_lineno}, in {frame.f_code.co_qualname}"


def _sensitive(
    model: Any, thresholds: list[Threshold], ids: Tensor, usual: Tensor
) -> Iterator[Threshold]:
    """Those that change the model's own results when they are lowered. Sizes of tensors break the
    model instead and are left out."""
    with lowered(thresholds):
        try:
            rows, _ = _run_alone(model, ids)
        except Exception:  # of any kind: a size no longer fits
            rows = None
    if not thresholds or (rows is not None and torch.equal(rows, usual)):
        return
    if len(thresholds) > 1:
        half = len(thresholds) // 2
        for part in (thresholds[:half], thresholds[half:]):
            yield from _sensitive(model, part, ids, usual)
    elif rows is not None and rows.isfinite().all():
        yield thresholds[0]


def _beyond(
    model: Any, config: Any, documents: list[Tensor], longest: int
) -> list[tuple[Threshold, Results]]:
    """Numbers that are no less than `longest` and change results if lowered, with these results."""
    ids = documents[0]
    usual, _ = _run_alone(model, ids)
    every = find_thresholds(model, config, longest)
    found = []
    for threshold in _sensitive(model, every, ids, usual):
        with threshold.lowered():
            found.append((threshold, [_run_alone(model, ids) for ids in documents]))
    return found


def _documents(model: Any, config: Any) -> list[Tensor]:
    """Random documents, of which the first is longer than any layer's window."""
    longest = max(LENGTHS[0], *(5 * (layer.size or 0) // 4 for layer in layer_masks(config)))
    # RoPE that scales with the largest position makes documents depend on each other.
    lengths = (longest,) if needs_largest_position(model) else (longest, *LENGTHS[1:])
    random = torch.Generator().manual_seed(0)
    return [torch.randint(config.vocab_size, (n,), generator=random) for n in lengths]


def _options(model: Any) -> dict[str, bool]:
    """Options that make a mixture of experts compute its auxiliary loss."""
    return {"output_router_logits": True} if hasattr(model, COEFFICIENT) else {}


def _run_alone(model: Any, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """The outputs and the loss of one document with the model's own attention."""
    ids = ids.to(model.device)[None]
    labels = {} if model.get_output_embeddings() is None else {"labels": ids}
    output = model(input_ids=ids, **labels, use_cache=False, **_options(model))
    return _rows(output), output.get("loss")


def _rows(output: Any) -> Tensor:
    """The logits `[rows, vocabulary]`, or the hidden states of a base model."""
    rows: Tensor = output["logits" if "logits" in output else "last_hidden_state"][0]
    return rows


@contextmanager
def _noisy_weights(model: Any) -> Iterator[None]:
    """Disables gradients and dropout, and adds noise to the weights so that attention scores are of
    order 1. Restores everything at the end."""
    training = {module: module.training for module in model.modules()}
    weights = [p for p in model.parameters() if p.is_floating_point()]
    saved = [weight.detach().to("cpu", copy=True) for weight in weights]
    random = torch.Generator().manual_seed(0)
    model.eval()
    try:
        with torch.no_grad():
            for weight in weights:
                size = 0.6 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 0.1
                noise = torch.randn(weight.shape, generator=random) * size
                weight.add_(noise.to(weight.device, weight.dtype))
            yield
    finally:
        for module, value in training.items():
            module.training = value
        with torch.no_grad():
            for weight, value in zip(weights, saved, strict=True):
                weight.copy_(value)
