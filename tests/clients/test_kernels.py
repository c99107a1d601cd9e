"""A row of the table of clients: Hugging Face `kernels` loads the package. See
tests/test_kernel_package.py."""

from __future__ import annotations

from tests import test_kernel_package as kernel_package

from .rows import shows

test_get_local_kernel = shows(
    "`get_local_kernel`: every public name, operators under the folder's name, a call",
    kernel_package.test_kernels_loads_it,
)
