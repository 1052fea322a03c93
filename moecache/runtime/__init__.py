"""From a path and a budget to a runtime, and its steps."""
