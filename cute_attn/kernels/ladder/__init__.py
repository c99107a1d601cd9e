"""The FMHA ladder: one attention forward, written again with one more idea at each step."""
