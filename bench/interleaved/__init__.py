"""Benchmarks in turns: jobs that are all alive, of which one runs at a time (bench/peers.py, bench/overlap.py)."""
