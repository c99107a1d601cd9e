"""Chunked kernels, which process 64 tokens at a time by matrix products."""
