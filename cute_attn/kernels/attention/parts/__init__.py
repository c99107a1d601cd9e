"""Device code that needs no particular architecture, which kernels of all rooms compose."""
