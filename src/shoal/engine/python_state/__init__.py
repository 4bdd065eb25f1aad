"""Find, compare, restore, save and copy the Python state that a step can reach."""
