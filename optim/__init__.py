"""Optimizers as optax gradient transformations. No method has landed here yet."""

__all__: list[str] = []
