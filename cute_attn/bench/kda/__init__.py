"""Benchmarks of Kimi Delta Attention, which share `cases`, `problem` and `fla_tuning`."""
