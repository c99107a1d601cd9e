"""Parts that all benchmarks use: `timing`, `roofline` (ceilings of the machine), `report` (tables,
JSON, Markdown), `output`, `plot`, and `environment` (hardware and versions). `registry` finds
benchmarks by name. Some benchmarks also use `ncu` and `green_context`.
"""
