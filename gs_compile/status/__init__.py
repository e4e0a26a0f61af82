"""What a run says of itself: one record, and from it the last step's numbers, a status file, a bar and a page."""
