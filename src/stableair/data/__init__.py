"""Who learns from what: data sets, the data folder, and how samples are divided over the clients."""
