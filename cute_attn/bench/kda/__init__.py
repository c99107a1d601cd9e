"""Benchmarks of Kimi Delta Attention; `cases`, `problem` and `fla_tuning` are what they share."""
