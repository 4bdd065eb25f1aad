"""Runs in several processes.

child              a forked process, and the pipe to it
parent             the parent of a worker, as the worker sees it
sharing            how many processes and threads, and which members train where
workers            a run shared by processes that each train their members to the end
temporary_workers  the same for a search, where workers have members for a few seconds
guard              a GPU run in a child process, which may lose its CUDA context
training_run       which of these trains the members of a call of `shoal.train`
"""
