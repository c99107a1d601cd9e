"""Softmax attention kernels. The modules here load no compiler; device code is in the folders."""
