"""Data set, manifest, spool, publication, verification, adoption."""
