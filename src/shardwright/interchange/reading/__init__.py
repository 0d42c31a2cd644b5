"""Text of other systems as values: shell scripts, Python files, YAML and JSON; settings that are read one at a time."""
