"""A run: the request, its problem, measurements, learned figures, and the store on disk that keeps all of it.

`setup` has the options that commands share. `prepare` makes the problem of a workload, `calibrate` fits it to measured
steps. `session` is a run with its store, `session_records` its records, `folder` the folder that it is kept in.
`step_script` writes its `step.py`.
"""
