"""The FMHA ladder: an attention forward in ten steps, each of which adds one idea."""
