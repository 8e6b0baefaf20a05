"""Going on with a run that was stopped: `state` is what a search has come to, `kept` how a file holds it, `journal`
writes it as the run goes, `config_file` and `prepared` read a run's words and its problem again, `session` is
`rlplace train --resume`."""
