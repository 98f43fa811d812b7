"""Many experiments that belong together: plans, and the processes, machines and clusters that compute them."""
