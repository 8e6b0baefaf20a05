"""The command line: one module a family of commands, all heavy imports inside them."""
