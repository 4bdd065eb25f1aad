"""Run folders: checkpoints, histories, results, and the lock that lets one run at a time use a folder."""
