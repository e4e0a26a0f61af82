"""Other schedules, to compare with."""
