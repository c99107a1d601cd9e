"""What the machine code of a kernel says, and its PTX does not. No GPU is needed.

- `cubin`: the ELF files in a compiler's object file, and the registers that ptxas chose
- `disassembly`: nvdisasm, wherever it is installed
- `listing`: a disassembled kernel as instructions, basic blocks and loops
- `tile_model`: what a K/V tile costs each warp role and each unit of an SM; spills
- `unset_registers`: registers that are read but never set, as a faulty compiler leaves them
"""
