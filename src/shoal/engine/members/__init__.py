"""Members: jobs that have been built, each with its network, optimizer, data order and history."""
