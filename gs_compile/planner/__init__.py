"""From a model and a machine to a placement: measure, solve, simulate."""
