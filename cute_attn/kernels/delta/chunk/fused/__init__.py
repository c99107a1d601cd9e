"""The fused path of `chunk_kda`: chunks are prepared in parallel, then the state passes them."""
