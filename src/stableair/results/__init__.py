"""Recorded runs: run folders, plots, tables, reports, statistics and trackers."""
