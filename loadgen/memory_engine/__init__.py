"""A small engine as a real process: a pool, a shared arena and sessions that write, against which relocation is
tried. It is about bytes, not about time: the emulated engine in ``loadgen.engine`` is the one that knows how long
things take."""
