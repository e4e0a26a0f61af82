"""A step's times before it runs, by the executor's own rule."""
