"""From a plan to straight-line Python, one function a device.

`generate` makes it, in the order of the plan, as the `StepCode` of `step_code`. `expressions` words ATen calls and
views, `gang_signals` says where gangs and their members wait for each other, and `update_runs` which updates one fused
call does.
"""
