"""The backward of the chunked path."""
