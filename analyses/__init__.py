"""Studies: one file each, read from top to bottom, copied to ask a new question."""
