"""From units to code: differentiated per class, compiled once per class."""
