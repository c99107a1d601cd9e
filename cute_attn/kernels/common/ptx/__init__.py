"""PTX instructions that the DSL has not, or has in another form, a module for each family.

Values are scalars or sequences of them, so that a kernel says which thread holds which element. A
kernel's cache key covers the modules that it imports: import the families, not the package.
"""
