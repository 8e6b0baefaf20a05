"""Going on with a run that was stopped, from what its folder holds.

`state` is what a search has come to, `kept` and `kept_state` are how a file holds it, and `journal` writes it as the
run goes. `config_file` and `prepared` read a run's words and its problem again, and `reopen` looks up what it asks for.
"""
