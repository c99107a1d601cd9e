"""The Gated Delta Net's operators."""
