"""Sweeps of experiments: plans, and the processes, machines and clusters that compute them."""
