"""Device code for any architecture, of which attention's kernels are composed."""
