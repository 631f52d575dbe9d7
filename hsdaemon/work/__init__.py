"""The worker: admission, requests, checks, progress; and the proof of an engine."""
