"""Attention that can be watched: maps, column sums and fused kernels."""

__all__: list[str] = []
