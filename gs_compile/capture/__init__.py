"""From a model to units: one captured graph, specialised, its loss made separable, split at its blocks."""
