"""What a run is made of: its folder, its tracking, the problem that it is about, and the simulator's calibration.

And `doctor`: whether runs will work here.
"""
