"""PTX instructions that the DSL lacks or has in another form, one module for each family.

Operands are scalars or sequences of scalars, so a kernel controls which thread holds which element.
A kernel's cache key covers the modules that it imports, so import a family, not the package.
"""
