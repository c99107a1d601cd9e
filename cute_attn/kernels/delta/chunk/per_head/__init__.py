"""The fused path of the chunked kernels for one decay a head, as in a Gated Delta Net (sm_90a)."""
