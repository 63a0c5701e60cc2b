"""Root finding, PageRank, projection-free optimisation and SCF. No method has landed here yet."""

__all__: list[str] = []
