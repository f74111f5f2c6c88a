"""Kernel `flash4`: flash-attn-4's kernels, called directly. Imported only where it is used."""
