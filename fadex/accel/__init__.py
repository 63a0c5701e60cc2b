"""Whole-program acceleration harness. No method has landed here yet."""

__all__: list[str] = []
