"""The command line: commands that belong together are one module; heavy imports are inside the functions."""
