"""The times of a step before it runs, by the same rule by which the executor issues it."""
