"""Parts that all benchmarks use: `timing`, `roofline` (ceilings of the machine), `report` (tables,
JSON, Markdown), `output`, `plot`, `environment` (hardware and versions), and `registry`, which
finds benchmarks by name. Some also use `ncu` and `green_context`.
"""
