"""Models of other fields than language, written as their papers describe them, for ``benchmarks/fields.py``."""
