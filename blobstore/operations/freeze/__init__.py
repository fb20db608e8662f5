"""Cold storage: models are compressed in place, alone or against a base, and restored."""
