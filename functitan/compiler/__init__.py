"""From a function to a Program: trace, propagate, reshard, split, verify, report."""
