"""Limits of single kernels, told from their machine code. Nothing here needs a GPU."""
