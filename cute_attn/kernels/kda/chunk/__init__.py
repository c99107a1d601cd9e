"""Chunked kernels: 64 tokens at a time, by matrix products."""
