"""Step 5 of the ladder, swizzle: shared memory without bank conflicts, and wider ldmatrix.

ldmatrix reads a matrix as 16 bytes of each of 8 rows. Rows of 256 bytes all start in the same bank,
so that a read takes 8 wavefronts in place of one. With unit u of row r at u ^ (r & 7), as
`spec.swizzled` says, the 8 units lie in different banks. And one ldmatrix.x4 loads two right
operands in place of one.
"""

from __future__ import annotations

from .step4_full import FmhaStep4


class FmhaStep5(FmhaStep4):
    operands_per_load = 2
