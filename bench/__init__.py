"""Benchmarks: each prints figures against a limit or a peer of the same run, and writes JSON."""
