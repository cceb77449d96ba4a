"""Model families, one file each: a config, ``declare``, ``forward``, ``loss`` and ``generate``."""

from functitan.nn.models import llama3

__all__ = ["llama3"]
