"""Record training steps as graphs of operators, and find out which steps are the same computation."""
