"""Instructions run on a GPU and in the emulator, with the same operands.

    python -m tests.emulator.silicon.generate         # tests/data/silicon/scalar.json
    python -m tests.emulator.silicon.collect OUT      # on a GPU: everything it gave
    python -m tests.emulator.silicon.pack OUT         # what of that is kept in tests/data/silicon

`test_silicon.py` runs the same cases in the emulator and compares.
"""
