"""Other packages' functions, with their arguments in their order, on this package's kernels.

A program changes only its import:

    from cute_attn.compat import flash_attn_func  # FlashAttention 2
    from cute_attn.compat.flash_attn_3 import flash_attn_func
"""

from .flash_attn_2 import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
