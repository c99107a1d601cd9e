"""Softmax attention kernels."""
