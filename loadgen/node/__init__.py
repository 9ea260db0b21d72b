"""An emulated node: engines of one Fleet behind the same sockets that real engines would have.

The simulated clock, which deadlines and leases use, moves one step when every worker's command has come.
"""
