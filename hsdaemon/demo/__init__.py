"""Shows the whole thing on one machine without a GPU; tests use its models and its reference. May import torch."""
