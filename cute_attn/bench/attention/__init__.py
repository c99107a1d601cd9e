"""Parts that the benchmarks of attention share."""
