"""Row operations in Triton agree with those in plain torch; without a GPU, in the interpreter."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from dyncp.kernels import Dtypes, IndexArrays, Memory, RowOps
from dyncp.kernels.row_ops import (
    IN_MEMORY,
    Copy,
    Form,
    Kind,
    Results,
    RowSum,
    Source,
    Target,
    panels_to_rows,
)
from kernel_styles import rows_to_panels
from sizes import full

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="needs triton (pip install -e '.[test]')")
SHAPES = [(1, 8), (3, 5), (4, 16), (2, 96)]  # heads and dimension
DTYPES = [
    Dtypes(torch.float32, torch.float32),
    Dtypes(torch.bfloat16, torch.bfloat16),
    Dtypes(torch.bfloat16, torch.float32),
    Dtypes(torch.float64, torch.float64),
]
BYTES = 1 << 20
TOKENS = (1, 17, 130, 3, 64)
# A small run tries every shape and every dtype once.
PAIRS = [((*shape, dtypes), i == j) for i, shape in enumerate(SHAPES)
         for j, dtypes in enumerate(DTYPES)]  # fmt: skip
each_shape_and_dtype = pytest.mark.parametrize(
    ("heads", "dim", "dtypes"), [pair if small else full(*pair) for pair, small in PAIRS]
)
each_shape = pytest.mark.parametrize(("heads", "dim"), SHAPES)


def triton_ops() -> RowOps:
    from dyncp.kernels.triton_row_ops import TritonRowOps

    return TritonRowOps()


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype).to(DEVICE)


@dataclass
class Place:
    """The memory of a call, and how many of its bytes are used."""

    dtypes: Dtypes
    used: int = 0

    def __post_init__(self):
        self.base = torch.zeros(BYTES, dtype=torch.uint8, device=DEVICE)
        self.memory = Memory.of(self.base, self.dtypes)

    def take(self, shape, dtype, seed=None) -> tuple[Tensor, int]:
        at, size = self.used, int(np.prod(shape)) * dtype.itemsize
        self.used += -(-size // 256) * 256
        assert self.used <= BYTES
        tensor = self.base[at : at + size].view(dtype).view(shape)
        if seed is not None:
            tensor.copy_(draw(*shape, dtype=dtype, seed=seed))
        return tensor, at


def send(make):
    """The launch that `make` returns, with its table on the device."""
    arrays = IndexArrays(DEVICE)
    launch = make(arrays)
    arrays.send()
    arrays.wait()
    return launch


def run_both(run):
    """Compares the results of plain torch and Triton, and returns those of torch."""
    expected, given = run(RowOps()), run(triton_ops())
    for a, b in zip(given, expected, strict=True):
        close(a, b)
    return expected


def close(given: Tensor, expected: Tensor) -> None:
    # The interpreter truncates to bf16, while GPUs and torch round.
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[given.dtype]
    torch.testing.assert_close(given, expected, atol=tolerance, rtol=tolerance)


def row(columns, **values):
    entry = np.zeros(len(columns), np.int64)
    for name, value in values.items():
        entry[columns[name]] = value
    return entry


@each_shape_and_dtype
def test_rows_are_copied_from_given_tensors_and_from_own_memory(heads, dim, dtypes):
    width, item = heads * dim, dtypes.input.itemsize

    def run(ops):
        place = Place(dtypes)
        workspace, at = place.take((300, heads, dim), dtypes.input, 1)
        message, to = place.take((300, heads, dim), dtypes.input)
        tensors = [draw(300, 2, heads, dim, dtype=dtypes.input, seed=s)[:, 1] for s in range(2, 6)]
        entries, done = [], 0
        for i, count in enumerate(TOKENS):
            source = i - 1  # IN_MEMORY, then every given tensor
            entries.append(
                row(Copy, KIND=Kind.ROWS, COUNT=count, WIDTH=width, SOURCE=source, FROM_ROW=width,
                    FROM=at + 7 * width * item if source == IN_MEMORY else 7 + i,
                    TO=to + done * width * item, TO_ROW=width)
            )  # fmt: skip
            done += count
        entries.append(
            row(Copy, KIND=Kind.ZEROS, COUNT=5, WIDTH=width, SOURCE=IN_MEMORY, TO=at, TO_ROW=width)
        )
        copy = send(lambda arrays: ops.copy(np.stack(entries), dim, dtypes, arrays))
        copy(place.memory, tensors, None)
        return [workspace, message]

    workspace, message = run_both(run)
    assert message[: sum(TOKENS)].count_nonzero() >= sum(TOKENS) * width - 3
    assert not message[sum(TOKENS) :].any()
    assert not workspace[:5].any()


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_values_stored_heads_first_are_packed_row_by_row(heads):
    dtypes = DTYPES[1]

    def run(ops):
        place = Place(dtypes)
        values, at = place.take((heads, 128), torch.float32, 1)
        packed, to = place.take((100, heads), torch.float32)
        scaled, to_scaled = place.take((heads, 128), torch.float32)
        lse = draw(heads, 90, dtype=torch.float32, seed=2).T
        lse[::3] = -torch.inf
        entries = [
            row(Copy, KIND=Kind.PER_HEAD, COUNT=40, WIDTH=heads, SOURCE=IN_MEMORY, FROM=at + 4 * 3,
                FROM_ROW=1, FROM_HEAD=128, TO=to, TO_ROW=heads, TO_HEAD=1),
            row(Copy, KIND=Kind.PER_HEAD, COUNT=21, WIDTH=heads, SOURCE=4, FROM=5,
                TO=to + 40 * heads * 4, TO_ROW=heads, TO_HEAD=1),
            row(Copy, KIND=Kind.BASE_2, COUNT=33, WIDTH=heads, SOURCE=4, FROM=2, TO=to_scaled,
                TO_ROW=1, TO_HEAD=128),
        ]  # fmt: skip
        copy = send(lambda arrays: ops.copy(np.stack(entries), 8, dtypes, arrays))
        copy(place.memory, (), lse)
        return [packed, scaled, values, lse]

    packed, scaled, values, lse = run_both(run)
    assert torch.equal(packed[:40], values.T[3:43])
    assert torch.equal(packed[40:61], lse[5:26])
    assert (scaled[:, :33].T[lse[2:35] == -torch.inf] == 0).all()


@each_shape_and_dtype
@pytest.mark.parametrize("has_lse", [True, False])
def test_contributions_are_merged_into_results_and_messages(heads, dim, dtypes, has_lse):
    width, sizes = heads * dim, (dtypes.input, dtypes.partial, dtypes.wide)

    def run(ops):
        place = Place(dtypes)
        sources, targets = [], []
        message, to = place.take((40, heads, dim), dtypes.partial)
        message_lse, to_lse = place.take((40, heads), dtypes.wide)
        for i, count in enumerate(TOKENS):
            for j in range(i):  # 0 to 4 contributions
                form = Form(j % 3)
                _, at = place.take((count, heads, dim), sizes[form], 10 * i + j)
                lse, lse_at = place.take((heads, 256), dtypes.wide, 20 * i + j)
                lse[:, ::3] = -torch.inf
                sources.append(
                    row(Source, FORM=form, AT=at, ROW=width, LSE=lse_at, LSE_ROW=1, LSE_HEAD=256,
                        SCALED=j % 2)
                )  # fmt: skip
            own = IN_MEMORY if i in (1, 3) else 0
            at = (to + (i == 3) * 17 * width * dtypes.partial.itemsize) if own else 20 + 100 * i
            targets.append(
                row(Target, RESULT=own, AT=at, HEAD=0 if own else 1, HEADS=heads, COUNT=count,
                    LSE=to_lse + (i == 3) * 17 * heads * dtypes.wide.itemsize,
                    FIRST=len(sources) - i, NUM=i)
            )  # fmt: skip
        results = Results(
            [torch.full((600, heads + 1, dim), 7.0, dtype=dtypes.input, device=DEVICE)],
            torch.full((heads + 1, 600), 7.0, dtype=dtypes.wide, device=DEVICE).T,
        )
        table = (np.stack(targets), np.stack(sources))
        combine = send(lambda arrays: ops.combine(table, dim, dtypes, arrays, has_lse=has_lse))
        combine(place.memory, results, 0.5)
        return [message, message_lse, results.rows[0], results.lse]

    _, _, rows, lse = run_both(run)
    assert not rows[20, 1:].any()  # without contributions
    assert (rows[:20] == 7).all()
    assert (rows[:, 0] == 7).all()
    assert (lse[20, 1:] == (-torch.inf if has_lse else 7)).all()


@each_shape
def test_panels_are_read_added_to_and_cleared(heads, dim):
    dtypes = DTYPES[1]
    width = -(-dim // 16) * 16

    def run(ops):
        place = Place(dtypes)
        sums, at = place.take((heads, 256, width), torch.float32, 1)
        received, from_message = place.take((50, heads, dim), torch.bfloat16, 2)
        message, to = place.take((30, heads, dim), torch.bfloat16)
        of_sums = {"FORM": Form.PANELS, "AT": at, "ROW": 256 * width, "DIM": width, "SCALED": 1}
        sources = [
            row(Source, **of_sums, PANEL_ROW=40),
            row(Source, FORM=Form.PARTIAL, AT=from_message, ROW=heads * dim),
            row(Source, **of_sums, PANEL_ROW=128, CLEARED=64),
        ]
        targets = [
            row(Target, AT=3, HEADS=heads, COUNT=50, FIRST=0, NUM=2),
            row(Target, RESULT=IN_MEMORY, AT=to, HEADS=heads, COUNT=30, FIRST=2, NUM=1),
        ]
        result = torch.zeros(60, heads, dim, dtype=torch.bfloat16, device=DEVICE)
        plain = panels_to_rows(sums.clone())[:, :, :dim].transpose(0, 1)
        table = (np.stack(targets), np.stack(sources))
        combine = send(lambda arrays: ops.combine(table, dim, dtypes, arrays, has_lse=False))
        combine(place.memory, Results([result]), 0.5)
        close(result[3:53], (plain[40:90] * 0.5 + received).bfloat16())
        close(message, (plain[128:158] * 0.5).bfloat16())
        return [result, message, panels_to_rows(sums)]

    *_, rows = run_both(run)
    assert not rows[:, 128:192].any()
    assert rows[:, :128].all()
    assert rows[:, 192:].all()


def test_panels_have_the_numbers_of_a_thread_next_to_each_other():
    rows = torch.arange(128 * 32, dtype=torch.float32).view(1, 128, 32)
    panels = rows_to_panels(rows)
    assert torch.equal(panels_to_rows(panels), rows)
    flat = panels.flatten()
    thread = lambda number: [divmod(int(x), 32) for x in flat[4 * number : 4 * number + 4]]  # noqa: E731
    assert thread(0) == [(0, 0), (0, 1), (8, 0), (8, 1)]
    assert thread(1) == [(0, 2), (0, 3), (8, 2), (8, 3)]
    assert thread(4) == [(1, 0), (1, 1), (9, 0), (9, 1)]
    assert thread(32) == [(16, 0), (16, 1), (24, 0), (24, 1)]
    assert thread(128) == [(0, 8), (0, 9), (8, 8), (8, 9)]
    assert thread(512)[0] == (64, 0)


@each_shape_and_dtype
@pytest.mark.parametrize("base_2", [True, False])
def test_row_sums_of_output_and_its_gradient(heads, dim, dtypes, base_2):
    def run(ops):
        place = Place(dtypes)
        delta, delta_at = place.take((heads, 256), dtypes.wide)
        scores, lse_at = place.take((heads, 256), dtypes.wide)
        out, dout = (draw(200, heads + 1, dim, dtype=dtypes.input, seed=seed) for seed in (0, 1))
        lse = draw(heads + 1, 200, dtype=dtypes.wide, seed=2).T
        lse[::5] = -torch.inf
        size = dtypes.wide.itemsize
        entries = [
            row(RowSum, ROW=first, HEAD=1, HEADS=heads, COUNT=count, PADDED=padded, STRIDE=256,
                DELTA=delta_at + place_of * size, LSE=lse_at + place_of * size)
            for first, count, place_of, padded in ((3, 70, 0, 128), (80, 5, 128, 64))
        ]  # fmt: skip
        row_sums = send(
            lambda arrays: ops.row_sums(np.stack(entries), dtypes, arrays, base_2=base_2)
        )
        row_sums(place.memory, dout, out, lse)
        exact = (dout.double() * out.double()).sum(-1)[3:73, 1:].T
        torch.testing.assert_close(delta[:, :70].double(), exact, atol=2e-2, rtol=2e-2)
        return [delta, scores]

    _, scores = run_both(run)
    assert (scores[:, 70:128] == torch.inf).all()
    assert (scores[:, 133:192] == torch.inf).all()
    assert not scores[:, 192:].any()
