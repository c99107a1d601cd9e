"""Times of single launches, to judge the predictions of `cute_attn.timing`."""
