"""What `pyxdev report` collects, and how personal data is kept out of it."""
