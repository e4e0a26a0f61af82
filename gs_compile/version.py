"""version: of this package, as commits, plans and ranks compare it; `pyproject.toml` has the same."""

__version__ = "0.2.0"
