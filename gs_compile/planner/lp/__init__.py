"""The linear program of the placement, and the search over micro-batches and alpha."""
