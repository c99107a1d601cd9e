"""The modular path of `chunk_kda`: a kernel for each stage, with public results."""
