"""Measure what is about to ship against what users would run otherwise, and write it down."""
