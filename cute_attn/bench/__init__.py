"""Benchmarks, one module each, run by `python -m cute_attn.bench NAME`.

`harness` is what all of them use; its `registry` lists them. `peers` compiles other packages'
kernels without a GPU.
"""
