"""Audits of what quantization does to a model. No method has landed here yet."""

__all__: list[str] = []
