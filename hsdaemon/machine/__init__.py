"""What we ask of a host: small Protocols (ports), one adapter each, every failure a value; and every fsync (disk)."""
