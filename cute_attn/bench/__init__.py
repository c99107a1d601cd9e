"""Benchmarks: each is a module, run by `python -m cute_attn.bench NAME`.

All benchmarks use `harness`, whose `registry` lists the benchmarks. `peers` compiles other
packages' kernels without a GPU.
"""
