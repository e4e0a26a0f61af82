"""The costs of a model: bytes, FLOPs and seconds of its units."""
