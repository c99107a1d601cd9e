"""Other libraries' doors to the operators. Each module imports its host only when used."""
