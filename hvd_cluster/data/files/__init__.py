"""Where files are stored, and how they are read and written."""
