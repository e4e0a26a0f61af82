"""From a model to units: one captured graph, specialised to a size, its loss made separable, split at its blocks."""
