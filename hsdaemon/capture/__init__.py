"""Runs inside the engine process. Imports wire alone of ours; inert without CAPTURE_ENV."""
