"""Plain attention of one tile in fp64 numpy, with heads repeated and scores written out."""

import numpy as np

from dyncp.arrays import Bool, Float64, Int64


def allowed_pairs(ranges: Int64, first_key: int, last_key: int) -> Bool:
    """bool[rows, keys]: keys in [first_key, last_key) that lie in the rows' ranges [rows, R, 2]."""
    key = np.arange(first_key, last_key)
    start, end = ranges[:, :, :1], ranges[:, :, 1:]
    return np.asarray(((key >= start) & (key < end)).any(axis=1))


def attend(
    q: Float64, k: Float64, v: Float64, allowed: Bool, scale: float
) -> tuple[Float64, Float64]:
    """Output [rows, q heads, dim] and log-sum-exp [rows, q heads]; 0 and −∞ without any key."""
    scores = _scores(q, k, allowed, scale)
    top = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - np.where(top == -np.inf, 0.0, top))
    total = weights.sum(axis=2, keepdims=True)
    shares = weights / np.where(total == 0, 1.0, total)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[:, :, 0].T
    return np.einsum("hqk,khd->qhd", shares, _repeat(v, q)), lse


def attend_backward(
    inputs: tuple[Float64, Float64, Float64],
    allowed: Bool,
    scale: float,
    dout: Float64,
    lse: Float64,
    delta: Float64,
) -> tuple[Float64, Float64, Float64]:
    """This tile's share of dq, dk and dv, from the final log-sum-exp and the row sums of dO·O."""
    q, k, v = inputs
    norm = np.where(lse == -np.inf, 0.0, lse).T[:, :, None]
    weights = np.exp(_scores(q, k, allowed, scale) - norm)
    dweights = np.einsum("qhd,khd->hqk", dout, _repeat(v, q))
    dscores = weights * (dweights - delta.T[:, :, None]) * scale
    dq = np.einsum("hqk,khd->qhd", dscores, _repeat(k, q))
    dk = np.einsum("hqk,qhd->khd", dscores, q)
    dv = np.einsum("hqk,qhd->khd", weights, dout)
    return dq, _reduce(dk, k), _reduce(dv, v)


def merge(out: Float64, lse: Float64, more: Float64, more_lse: Float64) -> None:
    """Merges a partial output and its log-sum-exp into `out` and `lse`, in place."""
    with np.errstate(invalid="ignore"):  # NaN is how unfilled rows show
        total = np.logaddexp(lse, more_lse)
    safe = np.where(total == -np.inf, 0.0, total)
    shares = (np.exp(side - safe)[:, :, None] for side in (lse, more_lse))
    out[:] = sum(part * share for part, share in zip((out, more), shares, strict=True))
    lse[:] = total


def _scores(q: Float64, k: Float64, allowed: Bool, scale: float) -> Float64:
    scores = np.einsum("qhd,khd->hqk", q, _repeat(k, q)) * scale
    return np.where(allowed, scores, -np.inf)


def _repeat(kv: Float64, q: Float64) -> Float64:
    """Every kv head once for each q head that it serves."""
    return np.repeat(kv, q.shape[1] // kv.shape[1], axis=1)


def _reduce(grad: Float64, kv: Float64) -> Float64:
    """Sum over the q heads of each kv head."""
    rows, heads, dim = kv.shape
    total: Float64 = grad.reshape(rows, heads, -1, dim).sum(axis=2)
    return total
