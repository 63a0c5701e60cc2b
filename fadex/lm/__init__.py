"""Unlearning, locking and logic extraction for language models. No method has landed here yet."""

__all__: list[str] = []
