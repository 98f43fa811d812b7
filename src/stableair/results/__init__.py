"""Run folders, and the plots, reports and trackers that use them."""
