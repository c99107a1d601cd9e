"""Benchmarks: one harness, one module per benchmark, run by `python -m cute_attn.bench NAME`.

The harness is `timing` (what a time means), `roofline` (what the machine can do), `report` (tables,
JSON, Markdown) and `plot`; `registry` finds the benchmarks, the modules that define `BENCHMARK`.
"""
