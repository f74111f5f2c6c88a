"""Kernels written in Triton, for any CUDA GPU from Ampere on. Imported only where one is used."""
