"""Cubins in an object file."""

from cute_attn.emulator import cubin


def elf(machine, size):
    """The smallest ELF header that has an end: one table of sections of `size` bytes in all."""
    header = bytearray(b"\x7fELF" + bytes(60))
    header[18:20] = machine.to_bytes(2, "little")
    header[40:48] = (64).to_bytes(8, "little")
    header[58:60] = size.to_bytes(2, "little")
    header[60:62] = (1).to_bytes(2, "little")
    return bytes(header) + bytes(range(size))


def test_cubins_are_cut_out_of_an_object():
    code = elf(cubin.EM_CUDA, 32)
    assert cubin.cubins(elf(62, 8) + b"text" + code + b"more" + b"\x7fELF") == [code]
