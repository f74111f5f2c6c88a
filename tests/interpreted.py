"""Marks tests that run Triton kernels on CPU tensors."""

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch


def _why_not() -> str:
    if torch.cuda.is_available():
        return "with a GPU, tests/gpu runs the kernels themselves"
    try:
        triton = tuple(map(int, version("triton").split(".")[:2]))
    except PackageNotFoundError:
        return "needs triton (pip install -e '.[test]')"
    numpy = tuple(map(int, version("numpy").split(".")[:2]))
    if triton < (3, 7) and numpy >= (2, 4):
        return "the interpreter of triton < 3.7 does not work with numpy >= 2.4"
    return ""


needs_interpreter = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "-")
