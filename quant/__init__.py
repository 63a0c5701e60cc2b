"""Number formats, quantizers and quantized pytrees. No method has landed here yet."""

__all__: list[str] = []
