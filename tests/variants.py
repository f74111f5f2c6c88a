"""Records which variants of our Triton kernels launches ask for, without running them."""

import importlib
import inspect

import torch

from dyncp.kernels.triton import backward, forward, rows

KERNELS = {
    "attend_tiles": forward.attend_tiles,
    "attend_backward_queries": backward.attend_backward_queries,
    "attend_backward_keys": backward.attend_backward_keys,
    "copy_rows": rows._copy_rows,
    "copy_per_head": rows._copy_per_head,
    "merge_rows": rows._merge_rows,
    "row_sums": rows._row_sums,
}


class Variants:
    """`seen` are the variants asked for so far: a kernel's name with what Triton compiles it for,
    on a Hopper GPU. Launches do nothing else."""

    def __init__(self, monkeypatch, kernels):
        self.seen = set()
        monkeypatch.setattr(importlib.import_module("dyncp.executor.call"), "_aligned", _aligned)
        for name, kernel in kernels.items():
            monkeypatch.setattr(kernel, "run", self._recorder(name, kernel))

    def _recorder(self, name, kernel):
        specialize = _specializer(kernel)

        def record(*args, grid, warmup, **kwargs):
            _, specialization, options = specialize(*args, **kwargs)
            self.seen.add((name, *map(str, specialization), str(sorted(options.items()))))

        return record


def _aligned(lse, _):
    """As on GPUs, where log-sum-exps that begin anywhere are copied."""
    rows, heads = lse.shape
    return torch.zeros(heads, -(-rows // 128) * 128)[:, :rows].T


def _specializer(kernel):
    """What Triton itself calls to find the variant of a launch."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    target = CUDABackend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(inspect.signature(kernel.fn), compiled.params, target)
