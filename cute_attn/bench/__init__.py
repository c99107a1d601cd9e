"""Benchmarks, one module each, run by `python -m cute_attn.bench NAME`.

All of them use `harness`, whose `registry` lists them. `peers` compiles other packages' kernels
without a GPU.
"""
