"""Whole programs without a GPU: unmodified scripts and test suites of CuTe DSL kernels.

`python -m cute_attn.emulator script.py` starts a process in which every CUDA call has a stand-in:

    process.py    the process: libraries loaded before all others, the compiler's environment
    device.py     the emulated device's properties
    memory.py     which of the process's memory is the device's
    tensors.py    CPU tensors that stand for CUDA tensors
    products.py   matrix products with a GPU's accumulation
    cuda.py       torch.cuda
    bindings.py   cuda.bindings: the driver and the runtime
    images.py     the PTX of each compiled module
    launches.py   launches, CUDA graphs, findings, the report
    dsl.py        the parts of the CuTe DSL that ask for a device or time a kernel
    install.py    puts the stand-ins in place
    options.py    options, and their command line
    run.py        runs a script
    hook.py       the file in site-packages for CUTE_ATTN_EMULATE=all
    startup.py    CUTE_ATTN_EMULATE=all, for programs that start without the command

The plugin for pytest is `cute_attn/pytest_emulate.py`, since every start of pytest imports it.
"""
