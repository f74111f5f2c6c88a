"""`to_contiguous` and `add_halo`: layers with state compute the same as on single documents."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dyncp import Batch, DCPExecutor, Layout, PlannerConfig, Topology, masks, plan_batch
from dyncp.plan import Direction, batch_order
from layers_with_state import KERNEL, WIDTH, linear_attention, one_by_one, short_conv
from processes import run_ranks

RANKS, HALO = 4, KERNEL - 1
BATCHES = {
    "documents": [masks.causal(31), masks.causal(5), masks.causal(18), masks.causal(1)],
    "packed": [masks.document_packed(29, documents=[2, 20, 1, 6]), masks.sliding_window(11)],
    "one long document": [masks.causal(43)],
    "branches": [
        masks.prefix_tree([-1, 0, 1, 1, 0], [7, 5, 3, 9, 4]),
        masks.shared_question(20, answers=3),
        masks.prefix_tree([-1, 0, 0, 1], [2, 1, 1, 4]),
    ],
}


def make_plan(name, multiple=1, solver="random", block_size=3):
    layout = Layout(local_multiple=multiple)
    config = PlannerConfig(solver=solver, block_size=block_size, layout=layout)
    return plan_batch(Batch.of(BATCHES[name]), Topology(1, RANKS), planner=config)


def values(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def inputs(name):
    """Tokens of the batch, weights of both layers, and the gradient of their results."""
    tokens = sum(mask.length for mask in BATCHES[name])
    x, grad = values(tokens, WIDTH), values(tokens, WIDTH, seed=2)
    weights = values(WIDTH, KERNEL, seed=3), values(WIDTH, 3 * WIDTH + 1, seed=4)
    return x, weights, grad


def by_piece(layer, x, rows):
    return torch.cat([layer(piece) for piece in x.split(rows.lengths)]) if len(x) else x


def convolved(step, x, weight):
    halo = step.add_halo(x, HALO)
    y = by_piece(lambda piece: short_conv(piece, weight), halo, step.halo(HALO))
    return step.drop_halo(y, HALO)


def recurrent(step, x, weight):
    whole = step.to_contiguous(x)
    y = by_piece(lambda piece: linear_attention(piece, weight), whole, step.contiguous)
    return step.from_contiguous(y)


def hybrid(step, x, weights):
    return recurrent(step, x + convolved(step, x, weights[0]), weights[1])


def gradients(out, x, weights, grad):
    out.backward(grad)
    return [x.grad, *[weight.grad for weight in weights]]


def expected(name):
    """Output and gradients of both layers, each text computed separately."""
    x, weights, grad = inputs(name)
    for tensor in (x, *weights):
        tensor.requires_grad_()
    of_batch = BATCHES[name]
    middle = x + one_by_one(lambda text: short_conv(text, weights[0]), x, of_batch)
    out = one_by_one(lambda text: linear_attention(text, weights[1]), middle, of_batch)
    return [out.detach(), *gradients(out, x, weights, grad)]


def check(found, wanted):
    for got, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            torch.as_tensor(got), true, rtol=0, atol=1e-11 * true.abs().max()
        )


@pytest.mark.parametrize(
    ("multiple", "solver"), [(1, "random"), (4, "random"), (1, "owner_computes")]
)
@pytest.mark.parametrize("name", BATCHES)
def test_layers_with_state_are_exact_on_virtual_ranks(name, multiple, solver):
    step = DCPExecutor(virtual_ranks=RANKS).prepare(make_plan(name, multiple, solver))
    x, weights, grad = inputs(name)
    rows = step.shard(x).requires_grad_()
    for weight in weights:
        weight.requires_grad_()
    out = hybrid(step, rows, weights)
    found = gradients(out, rows, weights, step.shard(grad))
    back = [torch.cat(step.gather(tensor.detach())) for tensor in (out, found[0])]
    check([*back, *found[1:]], expected(name))


CASES = [
    *[(name, 3, False) for name in BATCHES],
    *[
        (name, 64, checkpointed)
        for name in ("branches", "packed")
        for checkpointed in (False, True)
    ],
    ("one long document", 3, True),
    ("one long document", 64, True),
]


def train_on_rank(rank):
    """Gradients of every case, accumulated over two forwards that precede both backwards."""
    executor = DCPExecutor(timeout=60)
    found = []
    for name, block_size, checkpointed in CASES:
        step = executor.prepare(make_plan(name, block_size=block_size).parts[rank])
        x, weights, grad = inputs(name)
        rows = step.shard(x).requires_grad_()
        for weight in weights:
            weight.requires_grad_()
        run = partial(checkpoint, hybrid, use_reentrant=False) if checkpointed else hybrid
        before = step.transport.bytes_sent
        outs = [run(step, rows, weights) for _ in range(2)]
        orders = step.halo(HALO), step.contiguous
        moved = [rows.sent_bytes(WIDTH * 8, back=back) for rows in orders for back in (False, True)]
        assert step.transport.bytes_sent - before == 2 * sum(moved)
        for out in outs:
            out.backward(step.shard(grad) / 2)
        whole = [torch.cat(step.gather(t.detach())) for t in (outs[0], rows.grad)]
        own = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        tensors = [*whole, *[step.transport.sum(grad) for grad in own]]
        found.append(([t.numpy() for t in tensors], step.num_rows, step.contiguous.num_rows))
    return found


def test_layers_with_state_are_exact_on_processes_with_accumulation_and_checkpoints():
    of_ranks = run_ranks(train_on_rank, RANKS)
    for (name, *_), (found, *_) in zip(CASES, of_ranks[0], strict=True):
        check(found, expected(name))
    counts = [(own > 0, contiguous > 0) for found in of_ranks for _, own, contiguous in found]
    assert len(set(counts)) == 4  # including ranks without rows in either order


def moved(step, run):
    before = step.transport.bytes_sent
    result = run()
    return result, step.transport.bytes_sent - before


@pytest.mark.parametrize("name", BATCHES)
def test_the_bytes_that_travel_are_those_that_the_step_declares(name):
    plan = make_plan(name)
    step = DCPExecutor(virtual_ranks=RANKS).prepare(plan)
    x = step.shard(inputs(name)[0]).float().requires_grad_()
    width = WIDTH * 4
    for rows, there, back in (
        (step.contiguous, step.to_contiguous, step.from_contiguous),
        (step.halo(HALO), lambda t: step.add_halo(t, HALO), lambda t: step.drop_halo(t, HALO)),
    ):
        y, sent = moved(step, lambda there=there: there(x))
        assert sent == rows.sent_bytes(width)
        z, sent = moved(step, lambda back=back, y=y: back(y))
        assert sent == rows.sent_bytes(width, back=True)
        _, sent = moved(step, lambda y=y, z=z: torch.autograd.grad(z, y, z.detach()))
        assert sent == rows.sent_bytes(width, Direction.BACKWARD, back=True)
        _, sent = moved(step, lambda y=y, there=there: torch.autograd.grad(there(x), x, y.detach()))
        declared = rows.sent_bytes(width) + rows.sent_bytes(width, Direction.BACKWARD)
        assert sent == declared


def test_only_rows_that_a_rank_lacks_travel_to_it():
    """Counts directly the rows that a rank gets and does not own."""
    plan = make_plan("documents")
    step, part = DCPExecutor(virtual_ranks=RANKS).prepare(plan), plan.parts[0]
    tokens = int(part.lengths.sum())
    owner = np.repeat(np.arange(RANKS), part.rows_per_rank)[batch_order(part)]
    for rows, there in (
        (step.contiguous, step.to_contiguous),
        (step.halo(HALO), lambda t: step.add_halo(t, HALO)),
    ):
        got = there(step.shard(torch.arange(tokens))).split(rows.rows_per_rank.tolist())
        lacking = sum(
            len({t for t in row.tolist() if owner[t] != rank}) for rank, row in enumerate(got)
        )
        assert rows.sent_bytes(1) == lacking > 0
    assert step.halo(HALO).sent_bytes(1, back=True) == 0  # results stay where they are


def test_borders_say_which_documents_the_pieces_are():
    step = DCPExecutor(virtual_ranks=RANKS).prepare(make_plan("packed", multiple=4))
    tokens = step.shard(torch.arange(40), fill=-1)
    document = np.repeat(np.arange(5), [2, 20, 1, 6, 11])
    first = np.repeat([0, 2, 22, 23, 29], [2, 20, 1, 6, 11])
    for rows, order in (
        (step.contiguous, step.to_contiguous(tokens)),
        (step.halo(2), step.add_halo(tokens, 2)),
    ):
        assert rows.cu_seqlens.dtype == torch.int32
        assert rows.cu_seqlens.tolist() == np.append(0, np.cumsum(rows.lengths)).tolist()
        assert rows.num_rows == len(order) == len(rows.piece_of_row)
        pieces = order.split(rows.lengths)
        for piece, number, start in zip(pieces, rows.documents, rows.starts, strict=True):
            if number < 0:
                assert (piece == 0).all()  # padding rows
                continue
            assert (document[piece] == number).all()
            assert piece.tolist() == list(range(first[piece[0]] + start, piece[-1] + 1))
    assert set(step.contiguous.starts) == {0}
    assert sorted(x for x in step.contiguous.documents if x >= 0) == list(range(5))


def test_whole_documents_are_balanced_and_stay_at_home_where_they_can():
    lengths = [40, 33, 30, 21, 20, 13, 10, 7, 6, 5, 3, 2]
    batch = Batch.of([masks.causal(length) for length in lengths])
    for solver in ("uncut", "random"):
        config = PlannerConfig(solver=solver, block_size=5)
        step = DCPExecutor(virtual_ranks=3).prepare(
            plan_batch(batch, Topology(1, 3), planner=config)
        )
        rows = step.contiguous
        assert rows.imbalance == max(rows.rows_per_rank) * 3 / 190 < 1.1
        if solver == "uncut":
            assert rows.sent_bytes(1) < 0.2 * 190
    batch, config = Batch.of([masks.causal(900), masks.causal(60)]), PlannerConfig(solver="zigzag")
    step = DCPExecutor(virtual_ranks=3).prepare(plan_batch(batch, Topology(1, 3), planner=config))
    assert step.contiguous.imbalance == pytest.approx(900 / 320)
    assert step.halo(3).imbalance < 1.05
    assert step.halo(3).sent_bytes(1) < 0.05 * step.contiguous.sent_bytes(1)


def test_values_of_any_kind_travel():
    step = DCPExecutor(virtual_ranks=RANKS).prepare(make_plan("documents"))
    for x in (
        torch.arange(55),
        values(55) > 0,
        values(55, 2, 3).bfloat16(),
        values(55, 0),
        values(WIDTH, 55).T,
    ):
        rows = step.shard(x)
        assert torch.equal(step.from_contiguous(step.to_contiguous(rows)), rows)
        assert torch.equal(step.drop_halo(step.add_halo(rows, 2), 2), rows)
    with torch.inference_mode():
        step.add_halo(step.shard(values(55)), 5)
    x = step.shard(values(55)).requires_grad_()
    step.add_halo(x, 5).square().sum().backward()  # uses tensors that were made in inference mode
    first = x.grad
    (second,) = torch.autograd.grad((step.to_contiguous(x) ** 3).sum(), x, create_graph=True)
    assert torch.autograd.grad(second.sum(), x)[0] == pytest.approx(6 * x.detach())
    assert first.abs().sum() > 0


def test_what_cannot_be_right_is_refused():
    executor = DCPExecutor(virtual_ranks=RANKS)
    step = executor.prepare(make_plan("documents"))
    with pytest.raises(ValueError, match=r"to_contiguous got shape \(3,\); this step has 55 rows"):
        step.to_contiguous(torch.zeros(3))
    with pytest.raises(
        ValueError, match=r"drop_halo of 3 got shape \(55,\); this step has \d+ rows in"
    ):
        step.drop_halo(torch.zeros(55), 3)
    with pytest.raises(ValueError, match="halo is -1"):
        step.add_halo(torch.zeros(55), -1)
    hidden = masks.sliding_window(12, window=1)  # each token attends only itself
    plan = plan_batch(Batch.of([masks.causal(9), hidden]), Topology(1, RANKS))
    with pytest.raises(ValueError, match="the token before token 1 of sequence 1, which"):
        executor.prepare(plan).to_contiguous(torch.zeros(21))
    executor.close()
    with pytest.raises(ValueError, match="executor was closed"):
        step.to_contiguous(torch.zeros(55))
