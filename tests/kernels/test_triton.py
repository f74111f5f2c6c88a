"""Kernel `triton` against dense attention in fp64, through Triton's interpreter on the CPU."""

import pytest
import torch
from kernel_cases import dense, draw_call

from dyncp import Batch, DCPExecutor, Topology, attention, masks, plan_batch
from dyncp.kernels import BackwardInputs, Gradients, IndexArrays, RowState, Sums
from interpreted import needs_interpreter
from sizes import full

pytestmark = needs_interpreter
HEADS, KV_HEADS, SCALE = 4, 2, 0.3
CPU = torch.device("cpu")


def triton_kernel():
    from dyncp.kernels.triton_kernel import TritonKernel

    return TritonKernel()


def draw(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads_first(rows, heads, value=0.0):
    return torch.full((heads, -(-rows // 128) * 128), value)[:, :rows].T


def held_rows(states, rows, heads, dim, seed):
    """Sums that hold random values where the states say so, NaN elsewhere; and these values."""
    held = draw((rows, heads, dim), seed)
    before = torch.from_numpy(states.before).view(-1, 1, 1)
    sums = Sums(*(torch.full((rows, heads, dim), torch.nan) for _ in range(2)))
    sums.final[:] = torch.where(before == RowState.FINAL, held, torch.nan)
    sums.wide[:] = torch.where(before == RowState.WIDE, held, torch.nan)
    return sums, torch.where(before == RowState.NOTHING, 0.0, held)


def result_of(sums, states):
    after = torch.from_numpy(states.after).view(-1, 1, 1)
    return torch.where(after == RowState.WIDE, sums.wide, sums.final)


@pytest.mark.parametrize(("seed", "dim"), [(0, 80), (1, 16), full(0, 16), full(1, 80)])
def test_forward_merges_into_what_rows_hold(seed, dim):
    case = draw_call(seed, largest=120)
    (rows, keys), states = case.allowed.shape, case.call.q_states
    q, k, v = (draw((n, h, dim), seed + i) for i, (n, h) in enumerate(
        [(rows, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)]))  # fmt: skip
    out, held = held_rows(states, rows, HEADS, dim, seed)
    lse = heads_first(rows, HEADS, -torch.inf)
    lse[:] = torch.where(
        torch.from_numpy(states.before).view(-1, 1) == RowState.NOTHING,
        -torch.inf,
        draw(lse.shape, 9),
    )
    held_lse = lse.double().clone()
    kernel, arrays = triton_kernel(), IndexArrays(CPU)
    lowered = kernel.lower(case.call, arrays, backward=False)
    arrays.send()
    kernel.attend(lowered, q, k, v, SCALE, out, lse)

    new, new_lse, _ = dense(q, k, v, case.allowed, SCALE)
    total = torch.logaddexp(held_lse, new_lse)
    share = torch.where(total == -torch.inf, 0.0, torch.exp(new_lse - total)).unsqueeze(-1)
    held_share = torch.where(held_lse == -torch.inf, 0.0, torch.exp(held_lse - total))
    expected = new * share + held.double() * held_share.unsqueeze(-1)
    touched = torch.from_numpy(states.after) != RowState.UNTOUCHED
    torch.testing.assert_close(
        result_of(out, states)[touched].double(), expected[touched], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(lse[touched].double(), total[touched], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[~touched].double(), held_lse[~touched], rtol=0, atol=0)


@pytest.mark.parametrize(("seed", "dim"), [(0, 64), (1, 16), full(0, 16), full(1, 64)])
def test_backward_adds_to_what_rows_hold(seed, dim):
    case = draw_call(seed, largest=120)
    call, (rows, keys) = case.call, case.allowed.shape
    q, dout = draw((rows, HEADS, dim), seed), draw((rows, HEADS, dim), seed + 1)
    k, v = draw((keys, KV_HEADS, dim), seed + 2), draw((keys, KV_HEADS, dim), seed + 3)
    _, lse, _ = dense(q, k, v, case.allowed, SCALE)
    # As if other calls had keys of these rows.
    lse = torch.logaddexp(lse, draw(lse.shape, 5).double())
    lse[0] = -torch.inf if not case.allowed[0].any() else lse[0]
    delta = draw(lse.shape, 6)
    sums = [held_rows(call.q_states, rows, HEADS, dim, seed)]
    sums += [held_rows(call.k_states, keys, KV_HEADS, dim, seed + i) for i in (1, 2)]
    kernel, arrays = triton_kernel(), IndexArrays(CPU)
    lowered = kernel.lower(call, arrays, backward=True)
    arrays.send()
    first = [heads_first(rows, HEADS) for _ in range(2)]
    first[0][:], first[1][:] = lse.float(), delta
    grads = Gradients(*(s for s, _ in sums))
    kernel.attend_backward(lowered, BackwardInputs(q, k, v, dout, *first), SCALE, grads)

    repeat = HEADS // KV_HEADS
    wide_k, wide_v = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), wide_k) * SCALE
    weights = torch.exp(scores - first[0].double().T.unsqueeze(-1))
    weights = weights.masked_fill(~torch.from_numpy(case.allowed), 0.0)
    dscores = torch.einsum("qhd,khd->hqk", dout.double(), wide_v) - delta.double().T.unsqueeze(-1)
    dscores = weights * dscores * SCALE
    expected = [
        torch.einsum("hqk,khd->qhd", dscores, wide_k),
        torch.einsum("hqk,qhd->khd", dscores, q.double()),
        torch.einsum("hqk,qhd->khd", weights, dout.double()),
    ]
    for (got, held), states, new in zip(
        sums, (call.q_states, call.k_states, call.k_states), expected, strict=True
    ):
        if new.shape[1] != held.shape[1]:
            new = new.view(keys, KV_HEADS, repeat, dim).sum(2)  # noqa: PLW2901
        touched = torch.from_numpy(states.after) != RowState.UNTOUCHED
        want = new + held.double()
        torch.testing.assert_close(
            result_of(got, states)[touched].double(), want[touched], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("dtype", "dim", "part"),
    [
        (torch.float64, 64, "takes bf16, fp16 and fp32 .* q is fp64 with head dim 64"),
        (torch.float32, 264, "from 16 to 256 in steps of 8; q is fp32 with head dim 264"),
    ],
)
def test_an_unknown_dtype_or_head_dim_is_an_error(dtype, dim, part):
    plan = plan_batch(Batch.of([masks.causal(70)]), Topology(1, 1))
    step = DCPExecutor(kernel=triton_kernel()).prepare(plan)
    q = torch.zeros(70, 2, dim, dtype=dtype)
    with pytest.raises(ValueError, match=part):
        attention(step, q, q, q)


@pytest.mark.parametrize("first", [full("inputs"), "gradient"])
def test_tensors_with_heads_first_give_the_same(first):
    """Many models store tensors as [heads, tokens, dim] and transpose them."""
    plan = plan_batch(Batch.of([masks.causal(70)]), Topology(1, 1))
    step = DCPExecutor(kernel=triton_kernel()).prepare(plan)
    tensors = [draw((70, heads, 32), heads) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]

    def run(*tensors):
        q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
        out = attention(step, q, k, v)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])

    chosen = slice(0, 3) if first == "inputs" else slice(3, 4)
    turned = list(tensors)
    turned[chosen] = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors[chosen]]
    for given, expected in zip(run(*turned), run(*tensors), strict=True):
        assert torch.equal(given, expected)
