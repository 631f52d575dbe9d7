"""Pure decisions. Imports nothing that touches the world."""
