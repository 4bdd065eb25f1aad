"""What all split methods share: parts, state, rows, reports and checks."""
