"""The same plan and inputs give the same bits, gradients only with `deterministic`."""

import pytest
import torch
from gpu_cases import LENGTHS, MASKS, SHAPE, draw_rows, each_choice, plan_of, prepare, run

from dyncp import Batch


@each_choice
@pytest.mark.parametrize(("mask", "solver"), [("causal", "random"), ("lambda", "bisection")])
def test_the_same_bits_every_time(kernel, deterministic, mask, solver):
    plan = plan_of(Batch.of([MASKS[mask](length) for length in LENGTHS]), solver)
    step = prepare(plan, kernel, deterministic)
    rows = draw_rows(step, SHAPE)
    first = run(step, rows)
    same = first if deterministic else first[:1]
    for _ in range(3):
        again = run(step, rows)[: len(same)]
        assert all(torch.equal(a, b) for a, b in zip(same, again, strict=True))
