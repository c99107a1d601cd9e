"""Benchmarks of the Gated Delta Net. Cases, inputs and checks are `kda`'s."""
