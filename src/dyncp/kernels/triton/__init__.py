"""Kernels in Triton, for CUDA GPUs."""
