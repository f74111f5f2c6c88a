"""Records which variants of our Triton kernels launches ask for, without running them."""

import importlib
import inspect

from dyncp.kernels import triton_attention, triton_row_kernels

KERNELS = {
    "attend_tiles": triton_attention.attend_tiles,
    "attend_backward_queries": triton_attention.attend_backward_queries,
    "attend_backward_keys": triton_attention.attend_backward_keys,
    "copy": triton_row_kernels.copy_chunk,
    "combine": triton_row_kernels.combine_chunk,
    "row_sums": triton_row_kernels.row_sums_of_chunk,
}


class Variants:
    """`seen` are the variants asked for so far: a kernel's name with what Triton compiles it for,
    on a Hopper GPU. Launches do nothing else."""

    def __init__(self, monkeypatch, kernels):
        self.seen = set()
        # Launches leave nothing that could be compared.
        warm_up = importlib.import_module("dyncp.executor.warm_up")
        monkeypatch.setattr(warm_up, "_compare", lambda *_: None)
        for name, kernel in kernels.items():
            monkeypatch.setattr(kernel, "run", self._recorder(name, kernel))

    def _recorder(self, name, kernel):
        specialize = _specializer(kernel)

        def record(*args, grid, warmup, **kwargs):
            _, specialization, options = specialize(*args, **kwargs)
            self.seen.add((name, *map(str, specialization), str(sorted(options.items()))))

        return record


def _specializer(kernel):
    """What Triton itself calls to find the variant of a launch."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    target = CUDABackend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(inspect.signature(kernel.fn), compiled.params, target)
