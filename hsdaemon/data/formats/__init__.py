"""Output formats, one file per trainer."""
