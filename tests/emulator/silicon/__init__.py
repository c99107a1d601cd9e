"""Instructions run on a GPU and in the emulator, with the same operands.

    python -m tests.emulator.silicon.generate     # cases.json: what to run, as ptxas accepts it
    python -m tests.emulator.silicon.collect      # on a GPU: results.npz

`test_silicon.py` runs the same cases in the emulator and compares.
"""
