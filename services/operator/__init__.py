"""What operators see and order: the commands beside ``run`` and ``demo``. They speak to the bus alone."""
