"""Triton's row operations do what plain torch does; without a GPU they run in the interpreter."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dyncp.kernels import Held, IndexArrays, RowOps, Sums, TorchRowOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="needs triton (pip install -e '.[test]')")
SHAPES = [(1, 1), (3, 5), (4, 16), (2, 96)]  # heads and dimension
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def triton_ops() -> RowOps:
    from dyncp.kernels.triton.rows import TritonRowOps

    return TritonRowOps()


def segments(width: int, heads: int, seed: int = 0) -> np.ndarray:
    """Five blocks of different lengths, in another order in the message than in the rows."""
    rng = np.random.default_rng(seed)
    tokens = np.asarray([1, 17, 40, 3, 16])
    row = np.concatenate([[2], 2 + np.cumsum(tokens + 1)[:-1]])
    order = rng.permutation(5)
    offset = np.empty(5, np.int64)
    offset[order] = np.concatenate([[0], np.cumsum(tokens[order])[:-1]])
    before = rng.choice([Held.NOTHING, Held.FINAL, Held.WIDE], 5)
    after = rng.choice([Held.FINAL, Held.WIDE], 5)
    columns = (row, offset * width, tokens, before, after, offset * heads, 0 * row)
    return np.stack(columns, axis=1).astype(np.int64)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype).to(DEVICE)


def tables(ops: RowOps, table: np.ndarray) -> list[object]:
    """All segments at once, after one that other launches take."""
    arrays = IndexArrays(DEVICE)
    made = ops.tables(
        np.concatenate([table[:1], table]), np.asarray([0, 1, len(table) + 1]), arrays
    )
    event = arrays.send()
    if event is not None:
        event.wait()
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_packing_and_unpacking_copy_and_cast_rows(heads, dim, dtype):
    width, results = heads * dim, []
    for ops in (TorchRowOps(), triton_ops()):
        table = tables(ops, segments(width, heads))[1]
        strided = draw(90, 2, heads, dim, dtype=torch.float32, seed=0)[:, 1]
        message = torch.zeros(80 * width, dtype=dtype, device=DEVICE)
        ops.pack(table, [strided], message)
        back = torch.zeros(90, heads, dim, dtype=torch.float32, device=DEVICE)
        ops.unpack(table, message, [back])
        results.append((message, back))
    for given, expected in zip(results[1], results[0], strict=True):
        # The interpreter cuts bf16 off where GPUs and torch round.
        close(given.to(dtype), expected.to(dtype))
    assert results[0][0].count_nonzero() >= 77 * width - 1


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_values_that_lie_heads_first_are_packed_row_by_row(heads):
    results = []
    for ops in (TorchRowOps(), triton_ops()):
        table = tables(ops, segments(heads, heads))[1]
        values = draw(heads, 90, dtype=torch.float32, seed=0).T
        message = torch.zeros(80 * heads, dtype=torch.float32, device=DEVICE)
        ops.pack(table, [values], message)
        back = torch.zeros(heads, 90, device=DEVICE).T
        ops.unpack(table, message, [back])
        results.append((message, back))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def draw_sums(heads: int, dim: int, dtype: torch.dtype) -> Sums:
    final = draw(90, heads, dim, dtype=dtype, seed=1)
    wide = final if dtype != torch.bfloat16 else draw(90, heads, dim, dtype=torch.float32, seed=2)
    return Sums(final, wide)


def held(sums: Sums, table: np.ndarray) -> list[Tensor]:
    """Every segment's rows, from where its sum is afterwards."""
    kept = {Held.FINAL: sums.final, Held.WIDE: sums.wide}
    return [kept[after][row : row + count] for row, _, count, _, after, _, _ in table.tolist()]


def close(given: Tensor, expected: Tensor) -> None:
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[given.dtype]
    torch.testing.assert_close(given, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_partial_outputs_merge_as_the_states_say(heads, dim, dtype, seed):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    results = []
    for ops in (TorchRowOps(), triton_ops()):
        listed = segments(heads * dim, heads, seed)
        out = draw_sums(heads, dim, dtype)
        lse = draw(heads, 90, dtype=wide, seed=3).T
        message = draw(80 * heads * dim, dtype=dtype, seed=4)
        message_lse = draw(80 * heads, dtype=wide, seed=5)
        lse[::3] = -torch.inf
        message_lse[::4] = -torch.inf  # of some rows, both
        message.view(80, heads, dim)[message_lse.view(80, heads) == -torch.inf] = 0
        ops.merge(tables(ops, listed)[1], message, message_lse, out, lse)
        results.append((*held(out, listed), lse))
    for given, expected in zip(results[1], results[0], strict=True):
        close(given, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_gradients_add_up_as_the_states_say(heads, dim, dtype):
    results = []
    for ops in (TorchRowOps(), triton_ops()):
        listed = segments(heads * dim, heads, 7)
        sums = draw_sums(heads, dim, dtype)
        ops.add(tables(ops, listed)[1], draw(80 * heads * dim, dtype=dtype, seed=4), [sums])
        results.append(held(sums, listed))
    for given, expected in zip(results[1], results[0], strict=True):
        close(given, expected)


def in_turns(listed: np.ndarray, width: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """The segments, then those of even number again, then the first: other parts of the message are
    added to the same rows. Also the last ones of every row."""
    first, second, third = listed.copy(), listed[::2].copy(), listed[:1].copy()
    first[::2, 4] = second[0, 4] = second[:, 3] = third[0, 3] = Held.WIDE  # rounded at the end
    for again, tokens in ((second, 80), (third, 160)):
        again[:, 1] += tokens * width
        again[:, 5] += tokens * heads
    return np.concatenate([first, second, third]), np.concatenate([first[1::2], second[1:], third])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_results_for_the_same_rows_are_added_in_turn(heads, dim, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    results = []
    for ops in (TorchRowOps(), triton_ops()):
        listed, last = in_turns(segments(heads * dim, heads, 7), heads * dim, heads)
        table = tables(ops, listed)[1]
        message = draw(240 * heads * dim, dtype=dtype, seed=4)
        sums, out = draw_sums(heads, dim, dtype), draw_sums(heads, dim, dtype)
        lse = draw(heads, 90, dtype=wide, seed=3).T
        ops.add(table, message, [sums])
        ops.merge(table, message, draw(240 * heads, dtype=wide, seed=5), out, lse)
        results.append((*held(sums, last), *held(out, last), lse))
    for given, expected in zip(results[1], results[0], strict=True):
        close(given, expected)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_two_tensors_are_moved_and_added_to_at_once(heads, dim, dtype, alike):
    width, results = heads * dim, []
    for ops in (TorchRowOps(), triton_ops()):
        listed = segments(width, heads, 7)
        listed[::2, 6] = 1
        table = tables(ops, listed)[1]
        both = list(draw(90, 2, heads, dim, dtype=torch.float32, seed=0).unbind(1))
        if not alike:
            both[1] = both[1].contiguous()
        message = torch.zeros(80 * width, dtype=dtype, device=DEVICE)
        ops.pack(table, both, message)
        back = list(torch.zeros(90, 2, heads, dim, device=DEVICE).unbind(1))
        if not alike:
            back[1] = back[1].contiguous()
        ops.unpack(table, message, back)
        sums = [draw_sums(heads, dim, dtype), draw_sums(heads, dim, dtype)]
        ops.add(table, draw(80 * width, dtype=dtype, seed=4), sums)
        kept = [held(sums[one[6]], one[None])[0] for one in listed]
        results.append([message, *back, *kept])
    for given, expected in zip(results[1], results[0], strict=True):
        close(given.to(dtype), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_row_sums_of_output_and_its_gradient(rows, heads, dim, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    results = []
    for ops in (TorchRowOps(), triton_ops()):
        out, dout = (draw(rows, heads, dim, dtype=dtype, seed=seed) for seed in (0, 1))
        delta = torch.zeros(heads, 50, dtype=wide, device=DEVICE).T
        ops.row_sums(dout, out, delta[:rows])
        results.append(delta)
    close(results[1], results[0])
