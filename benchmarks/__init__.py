"""Benchmarks: run by hand, never as tests. Times are medians of interleaved runs on the machine at hand."""
