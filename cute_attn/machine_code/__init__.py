"""Analyses of a kernel's machine code, for facts that its PTX does not show. No GPU is needed.

- `disassembly`: finds and runs nvdisasm
- `listing`: a disassembled kernel as instructions, basic blocks and loops
- `tile_model`: the cost of a K/V tile for each warp role and each unit of an SM; spills
- `unset_registers`: registers that are read but never set, an error of the compiler
"""
