"""Ops of our own, each with a fake: what a graph names instead of many small ops. Below sharding."""
