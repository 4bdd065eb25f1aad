"""What survives a kill: files replaced whole, checkpoints that know their contents, one run for each folder."""
