"""`tidegate demo`: the closed loop on this machine, and the table that says what it was worth."""
