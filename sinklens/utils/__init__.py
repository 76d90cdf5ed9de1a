"""Helpers that know nothing of models: declared arguments, files and folders, integers, memory, progress, versions."""

__all__: list[str] = []
