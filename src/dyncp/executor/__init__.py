"""Runs plans: instruction loop, workspaces, autograd."""

from dyncp.executor.attention import DCPAttn, attention
from dyncp.executor.executor import DCPExecutor
from dyncp.executor.step import Step
