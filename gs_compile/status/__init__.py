"""The status of a run: one record, and from it the last step's numbers, a status file, a bar and a page."""
