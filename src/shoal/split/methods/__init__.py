"""The split methods: IST, SIL, local SGD and data parallel."""
