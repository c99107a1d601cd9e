"""What the benchmarks of attention share."""
