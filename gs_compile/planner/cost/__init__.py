"""What a model takes: bytes, FLOPs and seconds of its units."""
