"""What every benchmark uses: `timing` (what a time means), `roofline` (what the machine can do),
`report` (tables, JSON, Markdown), `output` and `plot`, `environment` (where it was measured), and
`registry`, which finds benchmarks by name. `ncu` and `green_context` serve some of them.
"""
