"""Make a dense network cheaper: prune channels away, then quantize linear layers; every candidate is a plain model."""
