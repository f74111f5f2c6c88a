"""GPU tests are skipped where there is no GPU."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "/gpu/" in str(item.fspath):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; none is here"))
