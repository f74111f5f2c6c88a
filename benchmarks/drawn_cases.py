"""Draws batches, plans and attention calls at random, and compares them with dense attention.

    python -m benchmarks.drawn_cases                        10,000 cases, 30 minutes on one core
    python -m benchmarks.drawn_cases --cases 0              runs until it is stopped
    python -m benchmarks.drawn_cases --seed 3 --only 271    repeats and describes one case

Masks × lengths × solvers × ranks × heads × dtypes, several masks, sinks and scales; virtual ranks.
Every case runs the whole path: plan, encode, decode, verify, run, and gather the results.
Outputs and all gradients are compared with dense attention in fp64 over a matrix of allowed pairs
(`drawn_masks`), which shares no code with dyncp. The error of 16-bit and fp32 results may be a few
times the error of dense attention in the same dtype. Invalid combinations of options (ValueError)
are counted as refused, with their reasons. The exit code is 1 if any case is wrong.
"""

import argparse
import itertools
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.drawn_masks import Allowed, draw_mask
from dyncp import (
    AttentionShape,
    Batch,
    DCPAttn,
    DCPExecutor,
    PlannerConfig,
    Topology,
    attention,
    plan_batch,
)
from dyncp.kernels import ReferenceKernel
from dyncp.placement import SOLVERS
from dyncp.plan import Layout, Plan
from dyncp.verify import verify_plan

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Largest allowed error relative to the result, and relative to the error of dense attention in the
# same dtype.
LEAST = {"fp64": 1e-12, "fp32": 5e-5, "bf16": 6e-2, "fp16": 8e-3}
TIMES_DENSE = 3.0
OF_SINK = 4.0  # its gradient is a sum over all rows, of terms of both signs
SECONDS_BETWEEN = 10.0


class WrongError(Exception):
    """The results of a case differ from dense attention."""


@dataclass(frozen=True)
class Case:
    batch: Batch
    allowed: dict[str, list[Allowed]]
    topology: Topology
    shape: AttentionShape
    config: PlannerConfig
    kernel: str
    rows_at_once: int  # of kernel reference
    mask: str
    scale: float | None
    has_sink: bool
    packed: bool

    def __str__(self) -> str:
        shown = (
            "topology",
            "shape",
            "config",
            "kernel",
            "rows_at_once",
            "mask",
            "scale",
            "has_sink",
        )
        of_batch = [f"lengths={self.batch.lengths}"] + [
            f"{name}={[mask.name for mask in of_name]}"
            for name, of_name in self.batch.masks.items()
        ]
        return "\n  ".join([*of_batch, *(f"{name}={getattr(self, name)}" for name in shown)])


def draw_case(rng: np.random.Generator) -> Case:
    lengths = _draw_lengths(rng)
    names = ["default", "local", "third"][: int(rng.choice([1, 1, 2, 3]))]
    drawn = [{name: draw_mask(rng, length) for name in names} for length in lengths]
    batch = Batch.of([{name: of.mask for name, of in entry.items()} for entry in drawn])
    shape = _draw_shape(rng)
    topology = Topology(int(rng.integers(1, 4)), int(rng.integers(1, 5)))
    if rng.random() < 0.3:  # links so slow that placements are improved by moves
        topology = topology.scaled(bandwidth=1e-4, latency=0)
    return Case(
        batch,
        {name: [entry[name].allowed for entry in drawn] for name in names},
        topology,
        shape,
        _draw_config(rng, shape, sum(lengths)),
        str(rng.choice(["cpu", "cpu", "reference"])),
        int(rng.choice([4, 16, 128])),
        str(rng.choice(names)),
        rng.choice([None, None, 0.3, 1.0, -0.5, 0.0]),
        bool(rng.random() < 0.3),
        bool(rng.random() < 0.5),
    )


def _draw_lengths(rng: np.random.Generator) -> list[int]:
    most = int(rng.choice([3, 20, 20, 80, 300]))
    number = int(rng.integers(1, 9)) if most < 300 else int(rng.integers(1, 3))
    return rng.integers(1, most + 1, number).tolist()


def _draw_shape(rng: np.random.Generator) -> AttentionShape:
    kv_heads, per_kv = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    dtype = str(rng.choice(list(DTYPES)))
    wider = dtype in ("bf16", "fp16") and rng.random() < 0.3
    return AttentionShape(
        kv_heads * per_kv,
        kv_heads,
        int(rng.choice([1, 7, 8, 16, 33, 64, 80])),
        dtype,
        "fp32" if wider else None,
        exact=bool(rng.random() < 0.7),
    )


def _draw_config(rng: np.random.Generator, shape: AttentionShape, tokens: int) -> PlannerConfig:
    solvers = sorted(set(SOLVERS) - {"hypergraph"})
    solvers = ["auto"] * (len(solvers) // 2) + solvers
    groups = int(rng.integers(1, shape.kv_heads + 1)) if shape.exact else 1
    return PlannerConfig(
        str(rng.choice(solvers)),
        block_size=None if rng.random() < 0.4 else -(-tokens // int(rng.integers(1, 24))),
        head_groups=groups if rng.random() < 0.5 else 1,
        divisions=[None, None, 2, 3, 5][int(rng.integers(5))],
        seed=int(rng.integers(100)),
        layout=Layout(int(rng.choice([1, 4, 128])), int(rng.choice([1, 1, 8]))),
        objective=str(rng.choice(["time", "time", "bytes"])),
    )


@dataclass(frozen=True)
class Tensors:
    """q, k, v and dout in batch order, and the sink."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sink: Tensor | None

    @staticmethod
    def draw(case: Case, seed: int) -> "Tensors":
        rng = torch.Generator().manual_seed(seed)
        shape, tokens = case.shape, case.batch.num_tokens
        heads = (shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads)
        sizes = [(tokens, h, shape.head_dim) for h in heads]
        drawn = [torch.randn(s, generator=rng).to(DTYPES[shape.dtype]) for s in sizes]
        sink = torch.randn(shape.q_heads, generator=rng) if case.has_sink else None
        return Tensors(*drawn, sink if sink is None else sink.to(DTYPES[shape.dtype]))


def run_dense(case: Case, tensors: Tensors, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv and dsink of plain dense attention."""
    given = [tensors.q, tensors.k, tensors.v, *([] if tensors.sink is None else [tensors.sink])]
    leaves = [x.to(dtype).requires_grad_() for x in given]
    q, k, v, *sink = leaves
    scale = case.shape.head_dim**-0.5 if case.scale is None else case.scale
    per_kv = case.shape.q_heads_per_kv_head
    parts, first = [], 0
    for allowed in case.allowed[case.mask]:
        rows = slice(first, first := first + len(allowed))
        keys, values = (x[rows].repeat_interleave(per_kv, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
        scores = scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)
        if sink:
            more = sink[0][:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, more], dim=-1)
        nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
        weights = scores.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)
        parts.append(torch.einsum("hqk,khd->qhd", weights[..., : len(allowed)], values))
    out = torch.cat(parts)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors.dout.to(dtype))]


def run_planned(case: Case, plan: Plan, tensors: Tensors) -> list[Tensor]:
    """The same results, computed by the plan on virtual ranks."""
    kernel = ReferenceKernel(case.rows_at_once) if case.kernel == "reference" else case.kernel
    step = DCPExecutor(virtual_ranks=case.topology.num_ranks, kernel=kernel).prepare(plan)
    order = torch.cat(step.gather(torch.arange(step.num_rows)))

    def local(x: Tensor) -> Tensor:
        """The rows of all ranks, concatenated; padding rows have any value."""
        rows = torch.full((step.num_rows, *x.shape[1:]), 7.0, dtype=x.dtype)
        rows[order] = x
        return rows

    q, k, v, dout = (local(x) for x in (tensors.q, tensors.k, tensors.v, tensors.dout))
    padding = torch.ones(step.num_rows, dtype=torch.bool)
    padding[order] = False
    dout[padding] = 0
    sink = None if tensors.sink is None else tensors.sink.clone().requires_grad_()
    q.requires_grad_()
    options: dict[str, Any] = {"mask": case.mask, "scale": case.scale, "sink": sink}
    leaves = [q]
    if case.packed:
        kv = torch.stack([k, v], dim=1).requires_grad_()
        leaves.append(kv)
        plain = case.mask == "default" and case.scale is None and sink is None
        out = DCPAttn.apply(step, q, kv) if plain else attention(step, q, *kv.unbind(1), **options)
    else:
        leaves += [k.requires_grad_(), v.requires_grad_()]
        out = attention(step, q, k, v, **options)
    dq, *others = torch.autograd.grad(out, [*leaves, *([] if sink is None else [sink])], dout)
    if case.packed:
        others = [*others[0].unbind(1), *others[1:]]
    gathered = [torch.cat(step.gather(x)) for x in (out.detach(), dq, *others[:2])]
    return gathered + others[2:]


def check_case(case: Case, seed: int) -> None:
    """Raises WrongError if a result is wrong, and ValueError for an invalid combination of
    options."""
    shape = case.shape if case.shape.exact else None
    plan = plan_batch(case.batch, case.topology, shape, case.config)
    plan = Plan.decode(plan.encode())
    violations = verify_plan(plan, case.batch)
    if violations:
        raise WrongError(f"the plan breaks invariants: {violations[0]}")
    tensors, dtype = Tensors.draw(case, seed), case.shape.dtype
    try:
        given = run_planned(case, plan, tensors)
    except ValueError as error:  # after planning, nothing may be refused
        raise WrongError(f"running raised {error!r}") from error
    expected = run_dense(case, tensors, torch.float64)
    low = expected if dtype == "fp64" else run_dense(case, tensors, DTYPES[dtype])
    for name, mine, theirs, exact in zip(
        ("out", "dq", "dk", "dv", "dsink"), given, low, expected, strict=False
    ):
        most = max(LEAST[dtype], TIMES_DENSE * _error(theirs, exact))
        most *= OF_SINK if name == "dsink" else 1.0
        if not (error := _error(mine, exact)) <= most:
            raise WrongError(f"{name} is off by {error:.1e}; at most {most:.1e} is allowed")


def _error(given: Tensor, exact: Tensor) -> float:
    """Relative error of norms. The gradients of a token that attends only itself cancel to 0 from
    terms of size 1 and leave rounding errors, so norms below 0.3 are taken as 0.3."""
    size = max(exact.norm().item(), 0.3 * exact.numel() ** 0.5)
    return (given.double() - exact).norm().item() / size


@contextmanager
def raising_warnings() -> Iterator[None]:
    """Turns warnings into WrongError: dyncp replaces a failing solver and warns, which is an error
    here."""

    class Raise(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    seen: list[str] = []
    handler, logger = Raise(logging.WARNING), logging.getLogger("dyncp")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if seen:
        raise WrongError(f"a warning: {seen[0]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="0: until stopped")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone and describe it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("dyncp").propagate = False
    if args.only is not None:
        case = draw_case(np.random.default_rng([args.seed, args.only]))
        print(f"case {args.only}\n  {case}", flush=True)
        check_case(case, args.only)
        print("right")
        return 0
    last = args.first + args.cases if args.cases else None
    numbers = itertools.count(args.first) if last is None else range(args.first, last)
    return run_cases(args.seed, iter(numbers))


def run_cases(seed: int, numbers: Iterator[int]) -> int:
    refused: Counter[str] = Counter()
    done, wrong, start = 0, 0, time.monotonic()
    said = start
    for number in numbers:
        case = draw_case(np.random.default_rng([seed, number]))
        try:
            with raising_warnings():
                check_case(case, number)
        except ValueError as error:
            refused[str(error)[:100]] += 1
        except KeyboardInterrupt:
            break
        except Exception as error:
            wrong += 1
            print(f"WRONG: --seed {seed} --only {number}: {error!r}\n  {case}", flush=True)
            if not isinstance(error, WrongError):
                traceback.print_exc()
        done += 1
        if time.monotonic() - said > SECONDS_BETWEEN:
            said = time.monotonic()
            per_case = (said - start) / done
            print(
                f"{done:,} cases up to number {number}, {refused.total()} refused, {wrong} wrong, "
                f"{1e3 * per_case:.0f} ms each",
                flush=True,
            )
    for reason, count in refused.most_common():
        print(f"refused {count} times: {reason}")
    print(f"{done:,} cases of seed {seed}: {done - wrong - refused.total():,} right, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
