"""The real host: every port wired to its adapter, and what people see and ask of a running supervisor."""
