"""Settings for all tests."""

import torch

# Test tensors are tiny: a second thread only adds waiting, and bits depend on the thread count.
torch.set_num_threads(1)
