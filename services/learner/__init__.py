"""The learner: transitions in, candidate policies out. It is never trusted; an examiner judges what it makes."""
