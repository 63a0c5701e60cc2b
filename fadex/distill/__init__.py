"""Distillation of diffusion models. No method has landed here yet."""

__all__: list[str] = []
