"""From units to code: each class of units is differentiated and compiled once."""
